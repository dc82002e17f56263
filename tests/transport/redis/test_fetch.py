"""A message goes from its list into its consumer's record in one step, and nowhere else."""

from __future__ import annotations

import gc
import json
import pkgutil
import ssl
import time
import weakref
from contextlib import suppress
from queue import Empty
from typing import Any

import pytest
import redis
from billiard.exceptions import SoftTimeLimitExceeded
from kombu import Connection, Queue
from kombu.transport.redis import Transport as StockTransport

from celery_sidejob import embedded
from celery_sidejob.transport import message_buried
from celery_sidejob.transport.redis.broker_channel import Asked
from celery_sidejob.transport.redis.fetching import AT_MOST, LOOK_AT_ONCE
from tests.tools.waiting import wait_until
from tests.transport.conftest import Connect, ours
from tests.transport.consuming import Consuming, publish, waiting


def held(server: redis.Redis) -> dict[str, int]:
    """How many messages each consumer has."""
    return {
        key.decode().partition("_sidejob.held.")[2]: server.hlen(key) for key in server.scan_iter("*_sidejob.held.*")
    }


def consumers(server: redis.Redis, prefix: str = "") -> list[str]:
    """Who is registered."""
    return [name.decode() for name in server.zrange(f"{prefix}_sidejob.consumers", 0, -1)]


def looks_of(channel: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Into how many queues each of its fetches looks from now on."""
    looked: list[int] = []
    fetch = channel._fetching.ask
    monkeypatch.setattr(
        channel._fetching, "ask", lambda queues, room: looked.append(len(queues)) or fetch(queues, room)
    )
    return looked


def test_the_urls_are_known_and_it_passes_for_redis() -> None:
    for url in ("sidejob://host:6379/3", "sidejobs://host:6379/3"):
        transport = Connection(url).transport
        assert isinstance(transport, StockTransport)
        assert (transport.driver_type, transport.driver_name) == ("redis", "redis")
    secure = Connection("sidejobs://host")
    assert secure.transport is not None
    assert secure.ssl == {"ssl_cert_reqs": ssl.CERT_REQUIRED}, "kombu's rediss:// verifies nothing by default"


def test_a_fetched_message_is_recorded_and_its_consumer_registered(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0, 1, 2)
    (oldest, *rest) = waiting(server, "queue")

    consuming = Consuming(connect(), "queue", prefetch=1)
    assert consuming.take(1) == [0]

    (consumer,) = consumers(server)
    assert held(server) == {consumer: 1}
    assert server.hvals(f"_sidejob.held.{consumer}") == [b"5:queue" + oldest], "byte by byte, and where it was"
    assert waiting(server, "queue") == rest
    tag = consuming.messages[0].delivery_tag
    assert tag == f"{consumer}#1.1"
    assert tag.encode() not in oldest, "the message's own tag is the same at each delivery"

    consuming.messages[0].ack()
    assert held(server) == {}


def test_a_fetch_takes_as_many_as_the_prefetch_allows(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", *range(2 * AT_MOST))
    consuming = Consuming(connect(), "queue", prefetch=5)

    assert consuming.take(2) == [0, 1], "one by one: it is not known yet whether they are worked on as they come"
    assert consuming.take(1) == [2, 3, 4]
    assert not consuming.drain_once(), "it is full"
    for message in consuming.messages[:2]:
        message.ack()
    assert consuming.take(1) == [5, 6]


def test_who_works_on_messages_as_they_come_is_given_one_by_one(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", *range(5))
    consuming = Consuming(connect(), "queue", prefetch=5)
    left: list[int] = []

    def work(message: Any) -> None:
        left.append(server.llen("queue"))
        message.ack()

    consuming._consumer.on_message = work
    consuming.drain()
    assert left == [4, 3, 2, 1, 0], "the others could have them meanwhile"


def test_without_a_prefetch_each_look_brings_one(connect: Connect) -> None:
    publish(connect(), "queue", *range(3))
    consuming = Consuming(connect(), "queue")
    consuming.drain_once()
    assert consuming.bodies == [0], "callers count on it, as with kombu's own"


def test_somebody_else_s_limit_is_respected(connect: Connect) -> None:
    publish(connect(), "queue", *range(10))
    consuming = Consuming(connect(), "queue", prefetch=10)
    consuming.channel.qos.can_consume = lambda: len(consuming.messages) < 3  # as worker_disable_prefetch does
    consuming.drain()
    assert consuming.bodies == [0, 1, 2]


def test_a_short_backlog_is_left_for_others_too(connect: Connect, server: redis.Redis) -> None:
    everybody = [Consuming(connect(), "queue", prefetch=8) for _ in range(4)]
    for consuming in everybody:
        consuming.drain(0.01)
    publish(connect(), "queue", *range(10))

    assert everybody[0].take(2) == [0, 1]
    assert everybody[0].take(1) == [2, 3], "there are four of them"


def test_without_acknowledgements_nothing_is_recorded(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0, 1)
    consuming = Consuming(connect(), "queue", no_ack=True)
    assert consuming.take(2) == [0, 1]
    assert (held(server), consumers(server)) == ({}, [])


def test_getting_one_is_a_fetch_too(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0, 1)
    channel = connect().default_channel
    message = channel.basic_get("queue")
    assert message.payload == 0
    assert list(held(server).values()) == [1]
    message.ack()
    assert held(server) == {}
    assert channel.basic_get("queue", no_ack=True).payload == 1
    assert channel.basic_get("queue") is None


def test_all_keys_have_the_prefix(connect: Connect, server: redis.Redis) -> None:
    prefixed = {"global_keyprefix": "shop:"}
    publish(connect(**prefixed), "queue", 0, 1)
    publish(connect(**prefixed), "queue", 2, priority=5)
    consuming = Consuming(connect(**prefixed), "queue", prefetch=2)
    assert consuming.take(2) == [0, 1]
    assert len(consumers(server, "shop:")) == 1
    assert [key for key in server.scan_iter() if not key.startswith(b"shop:")] == []
    consuming.messages[1].requeue()
    consuming.messages[0].ack()
    consuming.close()
    assert server.llen("shop:queue") == 1


def test_a_server_that_forgot_the_scripts_is_given_them_again(connect: Connect, server: redis.Redis) -> None:
    connection = connect()
    server.script_flush()
    publish(connection, "queue", 0)
    server.script_flush()
    consuming = Consuming(connection, "queue", prefetch=1)
    assert consuming.take(1) == [0]
    server.script_flush()
    consuming.messages[0].requeue()
    server.script_flush()
    assert connection.default_channel.basic_get("queue").payload == 0
    server.script_flush()
    with connection.Producer() as producer, producer.batch(max_size=10):
        producer.publish(1, routing_key="queue")
        producer.publish(2, routing_key="queue")
    assert consuming.take(1) == [1]


def test_what_a_lost_answer_brought_comes_again(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", *range(4))
    consuming = Consuming(connect(consumer_timeout=0.6, polling_interval=0.1), "queue", prefetch=2)
    channel = consuming.channel
    assert consuming.take(2) == [0, 1]
    consuming.messages[0].ack()
    first = channel.consumer.name

    channel.connection.cycle._register_BRPOP(channel)
    assert channel._asked is Asked.FETCH
    wait_until(lambda: held(server)[first] == 2, message="Redis to have carried out the fetch")
    channel._in_poll.disconnect()
    assert consuming.take(1) == [2], "it was in the record, and never heard of"
    assert held(server) == {first: 1, channel.consumer.name: 1}, "1 is being worked on"

    def gone() -> bool:
        consuming.drain_once()
        return consumers(server) == [channel.consumer.name]

    for message in consuming.messages[1:]:
        message.ack()
    wait_until(gone, message="the old name to go")
    assert consuming.bodies == [0, 1, 2, 3]
    consuming.close()
    assert (held(server), consumers(server)) == ({}, [])


def test_getting_one_does_not_mix_with_what_is_polled(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "polled", "a")
    publish(connect(), "other", "b")
    consuming = Consuming(connect(), "polled", prefetch=3)
    consuming.channel.connection.cycle._register_BRPOP(consuming.channel)
    assert consuming.channel.basic_get("other").payload == "b"
    assert consuming.take(1) == ["a"]
    consuming.messages[0].ack()
    assert list(held(server).values()) == [1]


def of(**changes: Any) -> bytes:
    """A message as kombu has it in Redis, but for these."""
    properties = {"delivery_tag": "t", "delivery_info": {}, "body_encoding": "base64"}
    return json.dumps({"body": "MQ==", "headers": {}, "properties": properties, **changes}).encode()


NO_MESSAGES = (
    b"{\xff",
    b'{"body": 1}',
    of(body="x"),
    of(properties={"delivery_tag": "t", "delivery_info": {}, "body_encoding": "rot13"}),
    of(headers=[1]),
    of(headers={"price": {"__type__": "decimal", "__value__": "x"}}),
    b"[" * 100_000,
)
"""Neither what is no JSON, nor what kombu cannot make a message of."""


@pytest.mark.parametrize("way", ["consumed", "got"])
def test_what_is_no_message_is_buried(connect: Connect, server: redis.Redis, way: str) -> None:
    told: list[dict[str, Any]] = []
    message_buried.connect(receiver := lambda **facts: told.append(facts))
    server.lpush("queue", *NO_MESSAGES)
    publish(connect(), "queue", "good")
    consuming = Consuming(connect(), "queue" if way == "consumed" else "elsewhere", prefetch=len(NO_MESSAGES) + 1)
    try:
        if way == "consumed":
            assert consuming.take(1) == ["good"]
        else:
            got = [consuming.channel.basic_get("queue") for _ in range(len(NO_MESSAGES) + 1)]
            assert [message and message.payload for message in got] == [None] * len(NO_MESSAGES) + ["good"]
    finally:
        message_buried.disconnect(receiver)
    assert list(held(server).values()) == [1]
    buried = [json.loads(text) for text in server.lrange("_sidejob.dead", 0, -1)]
    assert sorted(one["message"].encode("utf-8", "surrogateescape") for one in buried) == sorted(NO_MESSAGES)
    assert [(one["queue"], one["task_id"]) for one in told] == [("queue", None)] * len(NO_MESSAGES)


def test_a_channel_that_was_closed_is_forgotten(broker_url: str) -> None:
    connection = Connection(broker_url)
    consuming = Consuming(connection, "queue", prefetch=1)
    consuming.drain(0.01)
    gone = weakref.ref(consuming.channel)
    consuming.close()
    connection.release()
    del consuming, connection

    def is_forgotten() -> bool:
        gc.collect()
        return gone() is None

    wait_until(is_forgotten, message="the heart to end its beat, and the channel to be collected")


def test_what_comes_for_a_queue_that_was_just_cancelled_goes_back_in_its_order(
    connect: Connect, server: redis.Redis
) -> None:
    publish(connect(), "queue", *range(4))
    before = waiting(server, "queue")
    consuming = Consuming(connect(), "queue", prefetch=3)
    channel = consuming.channel
    channel._fetching.is_buffered = True
    channel.connection.cycle._register_BRPOP(channel)
    wait_until(lambda: sum(held(server).values()) == 3)
    consuming.cancel()
    consuming.drain_once()
    assert consuming.messages == []
    assert [json.loads(text)["body"] for text in waiting(server, "queue")] == [
        json.loads(text)["body"] for text in before
    ]


def test_a_raising_callback_holds_back_nothing_that_came_with_its_message(
    connect: Connect, server: redis.Redis
) -> None:
    publish(connect(), "queue", *range(3))
    consuming = Consuming(connect(), "queue", prefetch=3)
    consuming.channel._fetching.is_buffered = True

    def fail(message: Any) -> None:
        raise RuntimeError("no")

    consuming._consumer.on_message = fail
    with pytest.raises(RuntimeError, match="no"):
        consuming.drain_once()
    assert list(held(server).values()) == [1], "its own, which is its consumer's to deal with"
    assert len(waiting(server, "queue")) == 2


def test_a_key_that_is_no_list_is_reported_and_takes_nothing_with_it(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(), "wrong", "queue", prefetch=2)
    server.set("wrong", "no list")
    consuming.drain_once()
    assert consuming.bodies == [0]
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        consuming.drain()


def test_a_bell_wakes_whoever_waits(connect: Connect, server: redis.Redis) -> None:
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.drain(0.05)
    assert consuming.channel._asked is Asked.WAIT
    publish(connect(), "queue", 0)
    assert consuming.drain_once(1)
    assert server.pttl("_sidejob.bell.queue") in range(-2, 60_001), "a bell that nobody hears goes away"


def test_the_heart_rings_for_publishers_that_do_not(connect: Connect, redis_url: str) -> None:
    consuming = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    consuming.drain(0.05)
    publish(connect(redis_url), "queue", 0)
    assert consuming.drain_once(5), "kombu's transport only pushes"


def test_a_queue_is_added_while_the_channel_waits(connect: Connect) -> None:
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.drain(0.05)
    publish(connect(), "added", 0)
    consuming._consumer.add_queue(Queue("added", routing_key="added"))
    consuming._consumer.consume()
    assert consuming.drain_once(1)


def test_a_channel_closes_at_once_while_it_waits(connect: Connect, server: redis.Redis) -> None:
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.drain(0.05)
    assert len(consumers(server)) == 1
    began = time.monotonic()
    consuming.close()
    assert time.monotonic() - began < consuming.channel.brpop_timeout / 2
    assert consumers(server) == []
    publish(connect(), "queue", 0)
    other = Consuming(connect(), "queue", prefetch=1)
    assert other.take(1) == [0]


def test_a_full_server_still_serves_what_it_has(own_valkey: embedded.Valkey, connect: Connect) -> None:
    url = ours(own_valkey.url)
    connection = connect(url, consumer_timeout=0.6)
    publish(connection, "queue", *range(4))
    consuming = Consuming(connection, "queue", prefetch=2)
    with redis.Redis.from_url(own_valkey.url) as server:
        server.config_set("maxmemory", "1")
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            publish(connect(url), "queue", 4)
        assert consuming.take(2) == [0, 1]
        heart = consuming.channel.connection._heart
        assert heart.run_once().lost == ()
        consuming.messages[1].requeue()
        consuming.messages[0].ack()
        assert consuming.take(2) == [1, 2]
        consuming.close()
        assert (server.llen("queue"), held(server), consumers(server)) == (3, {}, [])


def test_many_queues_are_looked_through_by_one_script(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"queue{number}" for number in range(1000)]
    publish(connect(), "queue777", 0)
    publish(connect(), "queue5", 1, priority=9)
    channel = connect().channel()
    got: list[Any] = []
    for name in names:
        channel.basic_consume(name, no_ack=False, callback=got.append, consumer_tag=name)
    looked = looks_of(channel, monkeypatch)
    channel.connection.drain_events(channel.connection, timeout=5)
    channel.connection.drain_events(channel.connection, timeout=5)
    assert [message.payload for message in got] == [0, 1]
    assert looked == [1000, 1000], "one script for each message"


@pytest.mark.few(0)
def test_ten_thousand_queues_are_looked_through_page_by_page(
    connect: Connect, server: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"queue{number}" for number in range(10_000)]
    channel = connect(consumer_timeout=0.6).channel()
    got: list[Any] = []
    channel.basic_consume(names[0], no_ack=False, callback=got.append, consumer_tag="all")
    for name in names[1:]:  # as basic_consume does, which takes kombu half a minute for so many
        channel.connection._callbacks[name] = channel.connection._callbacks[names[0]]
    channel._active_queues += names[1:]
    channel._update_queue_cycle()
    looked = looks_of(channel, monkeypatch)

    def drained(count: int) -> bool:
        with suppress(TimeoutError, Empty):
            channel.connection.drain_events(channel.connection, timeout=0.2)
        return len(got) >= count and channel._asked is Asked.WAIT

    wait_until(lambda: drained(0), message="it to have found nothing")
    assert looked == [LOOK_AT_ONCE] * 10
    for number in (9_999, 5_000):
        publish(connect(), f"queue{number}", number)
    wait_until(lambda: drained(2), message="both")
    publish(connect(redis_url), "queue7000", 7_000)  # rings no bell, but the heart does for each page in turn
    wait_until(lambda: drained(3), message="the third")
    assert sorted(message.payload for message in got) == [5_000, 7_000, 9_999]


def test_a_fixed_order_holds_beyond_a_page(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.transport.redis.fetching.LOOK_AT_ONCE", 2)
    queues = ["a", "b", "c", "d", "e"]
    for name in reversed(queues):
        publish(connect(), name, f"{name}0", f"{name}1")
    consuming = Consuming(connect(queue_order_strategy="sorted"), *queues, prefetch=1)
    got = []
    for _ in range(10):
        got += consuming.take(1)
        consuming.messages[-1].ack()
    assert got == [f"{name}{number}" for name in queues for number in range(2)]


def test_who_was_interrupted_before_the_fetch_was_sent_fetches_anew(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(connect(), "queue", 0, 1)
    consuming = Consuming(connect(), "queue", prefetch=2)
    assert consuming.take(2) == [0, 1]
    consuming.drain()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    publish(connect(), "queue", 2)
    consuming.messages[0].ack()
    with monkeypatch.context() as limited:
        limited.setattr(consuming.channel.client.connection, "send_command", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consuming.drain()

    assert consuming.take(1, timeout=5) == [2]


STRIKES = [
    ("celery_sidejob.transport.redis.fetching.Fetching.taken", SoftTimeLimitExceeded),
    ("celery_sidejob.transport.redis.fetching.Fetching.turn_page", SoftTimeLimitExceeded),
    ("celery_sidejob.transport.redis.fetching.loads", SoftTimeLimitExceeded),
    ("kombu.transport.virtual.Message.__init__", SoftTimeLimitExceeded),
    ("kombu.transport.virtual.Message.__init__", KeyboardInterrupt),
    ("celery_sidejob.transport.redis.acknowledgements.QoS.append", SoftTimeLimitExceeded),
]


@pytest.mark.parametrize(("place", "error"), STRIKES)
def test_who_was_interrupted_before_what_was_fetched_was_handed_over_fetches_it_again(
    connect: Connect, server: redis.Redis, monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException]
) -> None:
    """It is good: nothing of it is buried. And it comes at once, not when this channel ends."""
    publish(connect(), "queue", 0, 1, 2)
    consuming = Consuming(connect(), "queue", prefetch=3)
    assert consuming.take(1) == [0]

    with monkeypatch.context() as limited:
        limited.setattr(place, once(error, pkgutil.resolve_name(place)))
        with pytest.raises(error):
            consuming.drain()

    assert consuming.take(2, timeout=5) == [1, 2]
    consuming.drain()
    assert consuming.bodies == [0, 1, 2]
    for message in consuming.messages:
        message.ack()
    assert server.llen("_sidejob.dead") == 0
    wait_until(lambda: consuming.drain_once() or held(server) == {}, message="all to be acknowledged")


@pytest.mark.parametrize("place", [place for place, _ in STRIKES if "turn_page" not in place])
def test_who_was_interrupted_while_getting_one_gets_it_next_time(
    connect: Connect, server: redis.Redis, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    publish(connect(), "queue", 0, 1)
    channel = connect().channel()

    with monkeypatch.context() as limited:
        limited.setattr(place, once(SoftTimeLimitExceeded, pkgutil.resolve_name(place)))
        with pytest.raises(SoftTimeLimitExceeded):
            channel.basic_get("queue")

    assert [channel.basic_get("queue").payload for _ in range(2)] == [0, 1]
    assert channel.basic_get("queue") is None
    assert server.llen("_sidejob.dead") == 0


def once(error: type[BaseException], then: Any) -> Any:
    """Raise this the first time; then do what is to be done."""
    struck: list[bool] = []

    def strike(*arguments: Any, **options: Any) -> Any:
        if not struck:
            struck.append(True)
            raise error
        return then(*arguments, **options)

    return strike
