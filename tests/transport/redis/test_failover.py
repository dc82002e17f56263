"""A broker of several URLs: whoever goes over to the next one is still ours, and what the first had is not lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis
from celery import Celery
from kombu import Connection

from celery_sidejob import embedded
from celery_sidejob.transport.redis.broker_channel import Asked, Channel
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.conftest import ours
from tests.transport.consuming import Consuming, publish


@pytest.fixture
def servers() -> Iterator[list[embedded.Valkey]]:
    """Two that know nothing of each other, and keep what they have when they are killed."""
    with ExitStack() as stack:
        yield [stack.enter_context(embedded.Valkey()) for _ in range(2)]


def consumers(server: embedded.Valkey) -> dict[bytes, float]:
    """Who fetches from a server, and until when each counts as alive."""
    with redis.Redis.from_url(server.url) as client:
        return dict(client.zrange("_sidejob.consumers", 0, -1, withscores=True))


def test_a_worker_goes_over_to_the_next_server_and_back(
    processes: Processes, servers: list[embedded.Valkey], record: Record
) -> None:
    first, second = servers
    urls = [ours(server.url) for server in servers]
    env = {"BROKER_URL": ";".join(urls), "CONSUMER_TIMEOUT": "1", **record.env}
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="solo")
    app = Celery("client", broker=urls, set_as_current=False)
    try:
        app.send_task("note", ("kept",), countdown=3600)
        worker.wait_for_log("received")
        first.kill()
        app.send_task("note", ("on the second",))
        record.wait_for("on the second", timeout=30)
        (before,) = consumers(second).values()
        wait_until(lambda: consumers(second) and min(consumers(second).values()) > before + 2000, message="a heart")

        first.start()
        second.kill()
        wait_until(lambda: len(consumers(first)) == 1 and "Recovered 1 messages" in worker.log(), timeout=30)
    finally:
        app.close()
    worker.wait_for_log("received", count=3)
    worker.terminate()
    assert worker.wait(15) == 0
    assert worker.log().count("received") == 3, "once more after it was given back"
    assert consumers(first) == {}


def test_the_next_server_is_ours_as_well_and_rings(servers: list[embedded.Valkey]) -> None:
    for order in (servers, list(reversed(servers))):
        gone, stays = order
        with Connection([ours(server.url) for server in order]) as connection:
            connection.connect()
            gone.kill()
            with Connection([ours(server.url) for server in order]) as other:
                other.ensure_connection(max_retries=3, interval_start=0)
                consuming = Consuming(other, "queue", prefetch=1)
                assert type(consuming.channel) is Channel
                wait_until(lambda c=consuming: c.drain(0.05) or c.channel._asked is Asked.WAIT, message="it to wait")
                consuming.fall_silent()  # the bell is not its heart's
                publish(connection, "queue", 1, retry=True, retry_policy={"max_retries": 3, "interval_start": 0})
                assert consuming.drain_once(2)
                assert len(consumers(stays)) == 1
        gone.start()
