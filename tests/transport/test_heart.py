"""What keeps a consumer alive, and who finds that it is not."""

from __future__ import annotations

import pytest
import redis

from celery_sidejob.transport.broker_channel import Channel
from celery_sidejob.transport.transport import Transport
from tests.tools.waiting import wait_until
from tests.transport.conftest import Connect
from tests.transport.consuming import Consuming, publish

IDLE_COMMANDS_OF_KOMBU = 1.0
"""A second: a BRPOP that is answered with nothing."""


def expiry(server: redis.Redis, consumer: str | None) -> float:
    """Until when a consumer counts as alive, in milliseconds."""
    score = server.zscore("_sidejob.consumers", consumer)
    assert score is not None
    return score


def test_a_consumer_that_does_nothing_else_stays_alive(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    consuming.take(1)
    first = expiry(server, consuming.channel._consumer)
    wait_until(lambda: expiry(server, consuming.channel._consumer) > first + 1200, message="to outlive two timeouts")
    assert server.zcard("_sidejob.recovering") == 0


def test_the_thread_ends_with_the_last_channel(connect: Connect, server: redis.Redis) -> None:
    def connections() -> int:
        here = str(server.connection_pool.connection_kwargs["db"])
        return sum(client["db"] == here for client in server.client_list())

    before = connections()  # with what other tests have left to the garbage collector
    consuming = [Consuming(connect(), "queue", prefetch=1) for _ in range(2)]
    for one in consuming:
        one.drain(0.01)
    wait_until(lambda: connections() == before + 6, message="a poll, a client and a heart for each")
    for one in consuming:
        one.connection.release()
    wait_until(lambda: connections() <= before, message="all of them to be gone")


def test_a_consumer_that_was_taken_for_dead_hears_of_it(
    connect: Connect, server: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.take(1)
    consumer = consuming.channel._consumer
    server.zrem("_sidejob.consumers", consumer)
    assert consuming.channel.connection._heart.run_once().lost == (consumer,)
    assert f"({consumer}) was silent" in caplog.text
    assert server.zscore("_sidejob.consumers", consumer) is None, "only a fetch registers"


def test_a_heart_goes_on_after_its_connection_broke(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    consuming.take(1)
    wait_until(lambda: expiry(server, consuming.channel._consumer))
    for client in server.client_list():
        if client["id"] != str(server.client_id()) and client["cmd"] in ("evalsha", "eval"):
            server.client_kill_filter(_id=client["id"])
    broken = expiry(server, consuming.channel._consumer)
    wait_until(lambda: expiry(server, consuming.channel._consumer) > broken + 600)


def test_idle_workers_ask_no_more_than_kombu_s() -> None:
    beats = 3 / Channel.consumer_timeout
    looks = 2 / Transport.brpop_timeout
    assert beats + looks <= 1.1 * IDLE_COMMANDS_OF_KOMBU
