"""What keeps a consumer alive, and who finds that it is not."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import pytest
import redis

from celery_sidejob import embedded
from celery_sidejob.transport.redis import records
from celery_sidejob.transport.redis.records import Records
from tests.tools.waiting import wait_until
from tests.transport.conftest import Connect, ours
from tests.transport.consuming import Consuming, publish

IDLE_COMMANDS_OF_KOMBU = 1.0
"""A second: a BRPOP that is answered with nothing."""
OBSERVED_S = 7.0


def expiry(server: redis.Redis, consumer: str | None) -> float:
    """Until when a consumer counts as alive, in milliseconds."""
    score = server.zscore("_sidejob.consumers", consumer)
    assert score is not None
    return score


def test_a_consumer_that_does_nothing_else_stays_alive(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    consuming.take(1)
    first = expiry(server, consuming.channel.consumer.name)
    wait_until(
        lambda: expiry(server, consuming.channel.consumer.name) > first + 1200, message="to outlive two timeouts"
    )
    assert server.zcard("_sidejob.recovering") == 0


def test_the_thread_ends_with_the_last_channel(connect: Connect, server: redis.Redis) -> None:
    def connections() -> set[str]:
        here = str(server.connection_pool.connection_kwargs["db"])
        return {client["id"] for client in server.client_list() if client["db"] == here}

    before = connections()  # with what other tests have left to the garbage collector
    consuming = [Consuming(connect(), "queue", prefetch=1) for _ in range(2)]
    for one in consuming:
        one.drain(0.01)
    wait_until(lambda: len(connections() - before) == 6, message="a poll, a client and a heart for each")
    for one in consuming:
        one.connection.release()
    wait_until(lambda: connections() <= before, message="all of them to be gone")


def test_a_consumer_that_was_taken_for_dead_hears_of_it(
    connect: Connect, server: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.take(1)
    consumer = consuming.channel.consumer.name
    server.zrem("_sidejob.consumers", consumer)
    assert consuming.channel.connection._heart.run_once().lost == (consumer,)
    assert f"({consumer}) was silent" in caplog.text
    assert server.zscore("_sidejob.consumers", consumer) is None, "only a fetch registers"


def test_an_emptied_redis_is_named_and_not_taken_for_silence(
    connect: Connect, server: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    publish(connect(), "queue", 0, 1)
    consuming = [Consuming(connect(), "queue", prefetch=1) for _ in range(2)]
    for one in consuming:
        one.take(1)
        one.channel.connection._heart.run_once()
    server.flushdb()
    for one in consuming:
        assert one.channel.connection._heart.run_once().lost == (one.channel.consumer.name,)
    said = [record.getMessage() for record in caplog.records if "consumer (" in record.getMessage()]
    assert len(said) == 2
    assert all(text.startswith("Redis was emptied") for text in said)


def test_a_heart_goes_on_after_its_connection_broke(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    consuming.take(1)
    wait_until(lambda: expiry(server, consuming.channel.consumer.name))
    for client in server.client_list():
        if client["id"] != str(server.client_id()) and client["cmd"] in ("evalsha", "eval"):
            server.client_kill_filter(_id=client["id"])
    broken = expiry(server, consuming.channel.consumer.name)
    wait_until(lambda: expiry(server, consuming.channel.consumer.name) > broken + 600)


def test_idle_consumers_ask_no_more_than_kombu_s(own_valkey: embedded.Valkey, connect: Connect) -> None:
    consuming = Consuming(connect(ours(own_valkey.url)), "queue", prefetch=1)
    consuming.drain(0.05)
    with redis.Redis.from_url(own_valkey.url) as server, server.monitor() as monitor:
        consuming.drain_once(OBSERVED_S)
        asked = Counter[str]()
        while monitor.connection.can_read(timeout=0):
            command = monitor.next_command()
            if command["client_type"] != "lua":
                asked[command["command"].split()[0]] += 1
    assert asked["EVALSHA"] > 2, "it beats"
    assert asked["EVALSHA"] + asked["BRPOP"] <= 1.1 * IDLE_COMMANDS_OF_KOMBU * OBSERVED_S + 1


def test_who_recovers_for_long_stays_alive(
    connect: Connect, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PAGE", 1)
    publish(connect(), "queue", *range(6))
    options = {"consumer_timeout": 0.6}
    dead = Consuming(connect(**options), "queue", prefetch=6)
    dead.take(6)
    dead.fall_silent()
    alive = Consuming(connect(**options), "elsewhere", prefetch=1)
    alive.drain(0.01)
    left: list[float] = []
    take_back = Records._take_back

    def slow(*arguments: Any) -> Any:
        time.sleep(0.15)
        seconds, micros = server.time()
        left.append(expiry(server, alive.channel.consumer.name) - seconds * 1000 - micros / 1000)
        return take_back(*arguments)

    monkeypatch.setattr(Records, "_take_back", slow)
    wait_until(lambda: server.llen("queue") == 6, message="all to be given back")
    assert len(left) == 6
    assert min(left) > 0, "it was never to be taken for dead itself"


def test_a_child_beats_for_none_of_its_parent_s(connect: Connect) -> None:
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.drain(0.01)
    heart = consuming.channel.connection._heart
    assert list(heart._consumers) == [consuming.channel.consumer.name]
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            heart.watch("child", list, lambda: None)
            os.write(writing, " ".join(heart._consumers).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1000) == b"child"
    os.close(reading)
    os.close(writing)
