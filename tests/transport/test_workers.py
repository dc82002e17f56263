"""Real workers that are stopped, frozen and killed while they run tasks that are acknowledged late."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from celery import Celery

from celery_sidejob import embedded
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess
from tests.transport.conftest import Connect, ours
from tests.transport.consuming import Consuming


def start(processes: Processes, broker_url: str, record: Record, pool: str = "solo", **options: Any) -> WorkerProcess:
    """A worker that counts as dead after a second of silence."""
    env = {"BROKER_URL": broker_url, "CONSUMER_TIMEOUT": "1", **record.env}
    return processes.start_worker("tests.transport.worker_app", env=env, pool=pool, **options)


@pytest.fixture
def send(broker_url: str) -> Any:
    """Sends a task of the plain app."""
    app = Celery("client", broker=broker_url, set_as_current=False)
    yield app.send_task
    app.close()


def holders(server: redis.Redis) -> set[str]:
    """Who is registered."""
    return {name.decode() for name in server.zrange("_sidejob.consumers", 0, -1)}


@pytest.mark.parametrize("pool", ["solo", "gevent"])
def test_a_task_that_keeps_its_worker_busy_is_not_begun_twice(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis, connect: Connect, pool: str
) -> None:
    worker = start(processes, broker_url, record, pool)
    send("compute", (2.5,))
    record.wait_for("begun")
    other = Consuming(connect(consumer_timeout=1), "celery", prefetch=1)
    other.drain(0.01)  # its heart would recover what it takes for a dead worker's
    record.wait_for("ended", timeout=20)
    wait_until(lambda: not list(server.scan_iter("_sidejob.held.*")), message="it to be acknowledged")
    other.drain(0.01)
    assert other.messages == []
    assert "taken for dead" not in worker.log()


def test_a_frozen_worker_s_task_goes_to_another_and_stays_with_it(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis, connect: Connect
) -> None:
    zombie = start(processes, broker_url, record, name="zombie")
    send("last", (0.5,))
    record.wait_for("begun")
    zombie.stop_signal()
    owner = Consuming(connect(consumer_timeout=1), "celery", prefetch=1)
    owner.take(1)  # recovered by its heart, as the zombie is silent
    mine = f"_sidejob.held.{owner.channel._consumer}"
    before = server.hgetall(mine)
    assert len(before) == 1

    zombie.cont()
    zombie.wait_for_log("was taken for dead")
    zombie.wait_for_log("Cannot ack the message")
    assert server.hgetall(mine) == before
    send("note", ("next",))
    record.wait_for("next")
    owner.close()
    record.wait_for("ended", count=2)
    zombie.terminate()
    assert zombie.wait(15) == 0
    assert holders(server) == set()


def test_what_a_killed_worker_had_is_run_by_the_next(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis
) -> None:
    killed = start(processes, broker_url, record, "prefork", concurrency=1)
    for number in range(4):
        send("last" if number == 0 else "note", (60,) if number == 0 else (f"task{number}",))
    record.wait_for("begun")
    wait_until(lambda: server.llen("celery") == 0, message="it to hold all of them")
    killed.kill_group()
    start(processes, broker_url, record, "prefork", concurrency=1)
    record.wait_for("begun", count=2)
    (second,) = [line for line in record.of("begun") if line != record.of("begun")[0]]
    assert second["delivery_count"] == 1
    assert record.of("task1") == [], "oldest first, and it is still at the first"


def test_a_worker_that_is_told_to_stop_gives_back_at_once(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis
) -> None:
    worker = start(processes, broker_url, record)
    send("note", ("far",), countdown=3600)
    worker.wait_for_log("received")
    worker.terminate()
    assert worker.wait(15) == 0
    assert (server.llen("celery"), holders(server)) == (1, set())


def test_a_worker_goes_on_after_redis_was_restarted(
    processes: Processes, own_valkey: embedded.Valkey, record: Record
) -> None:
    worker = start(processes, ours(own_valkey.url), record)
    app = Celery("client", broker=ours(own_valkey.url), set_as_current=False)
    app.send_task("note", ("held",), countdown=3)
    worker.wait_for_log("received")
    own_valkey.restart()
    worker.wait_for_log("Connection to broker lost")
    with redis.Redis.from_url(own_valkey.url) as server:
        wait_until(lambda: holders(server), timeout=30, message="it to fetch again")
    app.close()
    app.send_task("note", ("next",))
    record.wait_for("next")
    record.wait_for("held")
    worker.terminate()
    assert worker.wait(15) == 0
    assert len(record.read()) == 2
