"""In a worker's loop an acknowledgement is written at once, and its answer is read when the loop comes round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from kombu.asynchronous import Hub

from celery_sidejob.transport import message_refused
from celery_sidejob.transport.redis.acknowledgements import AT_MOST
from celery_sidejob.transport.redis.records import Records
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until
from tests.transport.conftest import Connect
from tests.transport.consuming import Consuming, publish
from tests.transport.redis.test_records import left_behind, listed, recover


class Looping(Consuming):
    """A consumer whose connection is in a loop of Celery's kind, which turns as often as it is asked to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._hub = Hub()
        self.connection.register_with_event_loop(self._hub)

    def drain_once(self, timeout: float = 0.1) -> bool:
        """Turn once; tells whether there was a message."""
        before = len(self.messages)
        self._hub.call_later(timeout, lambda: None)
        self._hub.run_once()
        return len(self.messages) > before

    def close(self) -> None:
        """Leave the loop as well."""
        super().close()
        self._hub.close()


@contextmanager
def no_writes(server: redis.Redis) -> Iterator[None]:
    """Have the server carry out what others write only after the block."""
    server.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    try:
        yield
    finally:
        server.execute_command("CLIENT", "UNPAUSE")


def held(server: redis.Redis) -> int:
    """How many messages are in records."""
    return sum(server.hlen(key) for key in server.scan_iter("_sidejob.held.*"))


def unreachable(*_: Any) -> bool:
    """As Redis is for a while."""
    raise redis.ConnectionError("away")


def raises(doing: Callable[[], None]) -> bool:
    """Tell whether the connection is lost."""
    try:
        doing()
    except redis.ConnectionError:
        return True
    return False


def test_nobody_waits_for_redis_and_all_is_carried_out(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", *range(5))
    consuming = Looping(connect(), "queue", prefetch=5)
    consuming.take(5)
    with no_writes(server):
        for message in consuming.messages[:4]:
            message.ack()
        consuming.messages[4].reject()
        assert held(server) == 5, "none is carried out yet"
    wait_until(lambda: held(server) == 0, message="all to be acknowledged")
    consuming.drain(0.01)
    assert not consuming.channel.acknowledgements._owed
    consuming.close()
    assert left_behind(server) == []


def test_who_leaves_gives_back_nothing_that_is_done_with(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", *range(AT_MOST + 10))
    consuming = Looping(connect(), "queue", prefetch=AT_MOST + 10)
    consuming.take(AT_MOST + 10)
    for message in consuming.messages[:-2]:  # more than may be owed an answer
        message.ack()
    assert len(consuming.channel.acknowledgements._owed) <= AT_MOST
    consuming.close()
    assert listed(server, "queue") == [AT_MOST + 8, AT_MOST + 9]
    assert left_behind(server) == []


def test_who_leaves_waits_for_acknowledgements_that_are_under_way(
    connect: Connect, server: redis.Redis, broker_url: str
) -> None:
    publish(connect(), "queue", *range(3))
    consuming = Looping(connect(), "queue", prefetch=3)
    consuming.take(3)
    with TcpProxy.to(broker_url) as slow:
        other = connect(slow.url_for(broker_url)).default_channel
        consuming.channel.acknowledgements._connect = other.pool.make_connection
        consuming.messages[0].ack()
        wait_until(lambda: held(server) == 2, message="the first to be acknowledged")
        slow.black_hole()
        consuming.messages[1].ack()
        consuming.messages[2].ack()
        leaving = threading.Thread(target=consuming.close)
        leaving.start()
        leaving.join(0.5)
        assert leaving.is_alive(), "nothing is given back before they are carried out"
        slow.pass_through()
        leaving.join(10)
        assert not leaving.is_alive()
    assert listed(server, "queue") == []
    assert left_behind(server) == []


@pytest.mark.parametrize("verb", ["ack", "reject"])
def test_what_comes_too_late_is_announced_when_the_loop_comes_round(
    connect: Connect, server: redis.Redis, verb: str
) -> None:
    told: list[dict[str, Any]] = []
    publish(connect(), "queue", 0, 1)
    zombie = Looping(connect(consumer_timeout=0.5), "queue", prefetch=2)
    zombie.take(2)
    zombie.fall_silent()
    recover(connect)
    owner = Consuming(connect(), "queue", prefetch=1)
    assert owner.take(1) == [0]

    message_refused.connect(receiver := lambda **facts: told.append(facts))
    try:
        for message in zombie.messages:
            getattr(message, verb)()
        zombie.channel.qos.can_consume()  # as each turn of the loop asks
        wait_until(lambda: zombie.channel.acknowledgements.hear() or len(told) == 2, message="both to be announced")
    finally:
        message_refused.disconnect(receiver)
    tags = [message.delivery_tag for message in zombie.messages]
    assert [(one["verb"], one["delivery_tag"]) for one in told] == [(verb, tag) for tag in tags]
    assert held(server) == 1, "the new owner's"


def test_what_had_no_answer_when_the_connection_broke_is_written_again(connect: Connect, server: redis.Redis) -> None:
    told: list[Any] = []
    publish(connect(), "queue", *range(6))
    consuming = Looping(connect(), "queue", prefetch=6)
    consuming.take(6)
    message_refused.connect(receiver := lambda **facts: told.append(facts))
    try:
        consuming.messages[0].ack()
        consuming.drain(0.01)
        with no_writes(server):
            for message in consuming.messages[1:4]:
                message.ack()
            (line,) = [one["id"] for one in server.client_list() if one["cmd"] == "hdel"]
            server.client_kill_filter(_id=line)  # with what it has not carried out
        consuming.drain(0.01)
        assert held(server) == 2
        for message in consuming.messages[4:]:
            message.ack()
        wait_until(lambda: held(server) == 0, message="the rest to be acknowledged")
        consuming.drain(0.01)
    finally:
        message_refused.disconnect(receiver)
    assert told == [], "whether they came too late is not known"
    consuming.close()
    assert listed(server, "queue") == []


def test_what_could_not_be_written_again_is_not_mixed_with_what_comes(
    connect: Connect, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    publish(connect(), "queue", *range(3))
    consuming = Looping(connect(), "queue", prefetch=3)
    consuming.take(3)
    acknowledgements = consuming.channel.acknowledgements
    message_refused.connect(receiver := lambda **facts: told.append(facts))
    try:
        with no_writes(server):
            consuming.messages[0].ack()
            (line,) = [one["id"] for one in server.client_list() if one["cmd"] == "hdel"]
            server.client_kill_filter(_id=line)
            with monkeypatch.context() as away:
                away.setattr(Records, "acknowledge", unreachable)
                wait_until(lambda: raises(acknowledgements.hear), message="it to find out")
        consuming.messages[1].ack()  # Redis is back
        acknowledgements.settle(within_s=5)
        consuming.messages[2].ack()
        acknowledgements.settle(within_s=5)
    finally:
        message_refused.disconnect(receiver)
    assert (held(server), told) == (0, [])


def test_what_was_interrupted_before_there_was_a_connection_is_written_with_the_next(
    connect: Connect, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(connect(), "queue", *range(3))
    consuming = Looping(connect(), "queue", prefetch=3)
    consuming.take(3)
    acknowledgements = consuming.channel.acknowledgements

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as limited:
        limited.setattr(acknowledgements, "_connect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consuming.messages[0].ack()
    for message in consuming.messages[1:]:
        message.ack()
    acknowledgements.settle(within_s=2)
    assert held(server) == 0
    consuming.close()
    assert listed(server, "queue") == []


def test_a_health_check_is_not_taken_for_an_answer(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", *range(20))
    consuming = Looping(connect(health_check_interval=0.001), "queue", prefetch=20)
    consuming.take(20)
    consuming.messages[0].ack()
    opened = server.info("stats")["total_connections_received"]
    for message in consuming.messages[1:]:
        message.ack()
    wait_until(lambda: held(server) == 0, message="all to be acknowledged")
    consuming.drain(0.01)
    assert not consuming.channel.acknowledgements._owed
    assert server.info("stats")["total_connections_received"] == opened, "none was given up for a wrong answer"
    consuming.close()


def test_who_has_no_loop_waits_for_each_answer(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.take(1)
    consuming.messages[0].ack()
    assert held(server) == 0
