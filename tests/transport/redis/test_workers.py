"""Real workers that are stopped, frozen and killed while they run tasks that are acknowledged late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from celery_sidejob import embedded
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess
from tests.transport.conftest import Connect, ours, unfinished
from tests.transport.consuming import Consuming


def start(
    processes: Processes,
    broker_url: str,
    record: Record,
    pool: str = "solo",
    *,
    loop_timeout: float = 30,
    **options: Any,
) -> WorkerProcess:
    """A worker that counts as dead after a second of silence."""
    env = {"BROKER_URL": broker_url, "CONSUMER_TIMEOUT": "1", "LOOP_TIMEOUT": str(loop_timeout), **record.env}
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


def waiting(server: redis.Redis) -> list[str]:
    """The tasks that a worker holds and has not begun, as of its last beat."""
    found = []
    for key in server.scan_iter("_sidejob.held.*"):
        unbegun = server.smembers(key.replace(b".held.", b".waiting."))
        found += [entry for token, entry in server.hgetall(key).items() if token in unbegun]
    return sorted(name for entry in found for name in ("last", "note") if f'"task": "{name}"'.encode() in entry)


@pytest.mark.parametrize("pool", ["solo", "gevent"])
def test_a_task_that_keeps_its_worker_busy_is_not_begun_twice(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis, connect: Connect, pool: str
) -> None:
    worker = start(processes, broker_url, record, pool, loop_timeout=0.5)
    send("compute", (2.5,))
    record.wait_for("begun")
    other = Consuming(connect(consumer_timeout=1), "celery", prefetch=1)
    other.drain(0.01)  # its heart would recover what it takes for a dead worker's
    record.wait_for("ended", timeout=20)
    wait_until(lambda: not list(server.scan_iter("_sidejob.held.*")), message="it to be acknowledged")
    other.drain(0.01)
    assert other.messages == []
    assert "declared dead" not in worker.log()
    assert "been stuck" not in worker.log()


def test_what_is_limited_holds_up_nothing_else(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis
) -> None:
    worker = start(processes, broker_url, record)
    send("limited", ("limited1",))
    send("limited", ("limited2",))
    send("note", ("free",))
    record.wait_for("limited1")
    record.wait_for("free")
    assert record.of("limited2") == []
    worker.terminate()
    assert worker.wait(15) == 0
    (text,) = server.lrange("celery", 0, -1)
    assert json.loads(text)["headers"]["argsrepr"] == "('limited2',)", "it was fetched, and went back"


def test_a_frozen_worker_s_task_goes_to_another_and_stays_with_it(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis, connect: Connect
) -> None:
    zombie = start(processes, broker_url, record, name="zombie")
    send("last", (0.5,))
    record.wait_for("begun")
    zombie.stop_signal()
    owner = Consuming(connect(consumer_timeout=1), "celery", prefetch=1)
    owner.take(1)  # recovered by its heart, as the zombie is silent
    mine = f"_sidejob.held.{owner.channel.consumer.name}"
    before = server.hgetall(mine)
    assert len(before) == 1

    zombie.cont()
    zombie.wait_for_log("was declared dead")
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
    # What Redis knows of it is as old as the last beat, which may have been before it had begun the first.
    wait_until(lambda: waiting(server) == ["note"] * 3, message="a beat to tell that it has begun the first")
    killed.kill_group()
    start(processes, broker_url, record, "prefork", concurrency=1)
    record.wait_for("begun", count=2)
    (second,) = [line for line in record.of("begun") if line != record.of("begun")[0]]
    assert second["delivery_count"] == 1
    assert record.of("task1") == [], "oldest first, and it is still at the first"


@pytest.mark.parametrize("pool", ["solo", "eventlet"])
def test_a_worker_that_is_told_to_stop_gives_back_at_once(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis, pool: str
) -> None:
    worker = start(processes, broker_url, record, pool)
    send("note", ("far",), countdown=3600)
    worker.wait_for_log("received")
    worker.terminate()
    assert worker.wait(15) == 0
    assert (server.llen("celery"), holders(server)) == (1, set())


@pytest.mark.parametrize("pool", ["solo", "eventlet"])
def test_a_worker_goes_on_after_redis_was_restarted(
    processes: Processes, own_valkey: embedded.Valkey, record: Record, pool: str
) -> None:
    worker = start(processes, ours(own_valkey.url), record, pool)
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


def let_it_take_nothing(server: redis.Redis, why: str) -> None:
    """Have a server refuse all writes with a word; `let_it_be` ends that."""
    if why == "NOREPLICAS":
        server.config_set("min-replicas-to-write", 1)
        return
    server.config_set("save", "3600 1")
    Path(server.config_get("dir")["dir"], "dump.rdb").mkdir()  # what it would write
    server.bgsave()
    wait_until(lambda: server.info("persistence")["rdb_last_bgsave_status"] == "err", message="it to fail to save")


def let_it_be(server: redis.Redis) -> None:
    """Have it take everything again."""
    server.config_set("min-replicas-to-write", 0)
    server.config_set("save", "")


@pytest.mark.few(1)
@pytest.mark.parametrize("why", ["NOREPLICAS", "MISCONF"])
def test_a_worker_waits_while_its_redis_takes_nothing(
    processes: Processes, own_valkey: embedded.Valkey, record: Record, why: str
) -> None:
    settings = {"broker_transport_options": {"consumer_timeout": 1, "polling_interval": 1}}
    env = {"BROKER_URL": ours(own_valkey.url), "SETTINGS": json.dumps(settings), **record.env}
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="solo")
    with (
        redis.Redis.from_url(own_valkey.url) as server,
        Celery("client", broker=ours(own_valkey.url), set_as_current=False) as app,
    ):
        app.send_task("note", ("before",))
        app.send_task("note", ("held",), countdown=8)
        record.wait_for("before")
        worker.wait_for_log("received", count=2)
        let_it_take_nothing(server, why)
        worker.wait_for_log("Trying again in 4.00 seconds", 30)  # it tries again and again
        with pytest.raises(OperationalError, match=why):
            app.send_task("note", ("refused",), retry=False)
        let_it_be(server)
        app.send_task("note", ("next",))
        record.wait_for("next", timeout=30)
        record.wait_for("held", timeout=40)
        wait_until(lambda: not list(server.scan_iter("_sidejob.held.*")), message="all to be acknowledged")
        worker.terminate()
        assert worker.wait(15) == 0
        assert holders(server) == set()
    assert sorted(line["event"] for line in record.read()) == ["before", "held", "next"]
    assert why in worker.log()


@pytest.mark.few(0)
def test_workers_with_eventlet(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis
) -> None:
    killed = start(processes, broker_url, record, "eventlet", concurrency=2)
    send("hold")
    record.wait_for("begun")
    wait_until(lambda: unfinished(server) == 1, message="it to be held until it is done")
    killed.kill_group()
    worker = start(processes, broker_url, record, "eventlet", concurrency=2)
    record.wait_for("begun", count=2)
    send("note", ("beside it",))
    record.wait_for("beside it")
    with Celery("client", broker=broker_url, set_as_current=False) as app:
        assert [list(answer) for answer in app.control.ping(timeout=5, limit=1)] == [[worker.nodename]]
    worker.terminate()
    worker.wait_for_log("Warm shutdown")
    record.note("go")
    assert worker.wait(15) == 0
    assert len(record.of("ended")) == 1
    assert (unfinished(server), server.llen("celery"), holders(server)) == (0, 0, set())


def test_a_full_server_is_drained_by_a_worker_that_starts_and_connects_again(
    processes: Processes, own_valkey: embedded.Valkey, record: Record
) -> None:
    """kombu's first writes, the bindings of queues and a lock, are refused."""
    with Celery("client", broker=ours(own_valkey.url), set_as_current=False) as app, redis.Redis.from_url(
        own_valkey.url
    ) as server:  # fmt: skip
        app.send_task("note", ("sent before it was full",))
        server.delete(*server.keys("_kombu.binding.*"))
        server.config_set("maxmemory", "1")
        worker = start(processes, ours(own_valkey.url), record)
        record.wait_for("sent before it was full", timeout=20)
        server.client_kill_filter(_type="normal", skipme=True)
        wait_until(lambda: worker.log().count("Connected to") == 2, timeout=20, message="it to connect again")

        server.config_set("maxmemory", "0")
        wait_until(lambda: len(server.smembers("_kombu.binding.celery")) == 1, timeout=20, message="its binding")
        app.send_task("note", ("sent when there was room",))
        record.wait_for("sent when there was room", timeout=20)
