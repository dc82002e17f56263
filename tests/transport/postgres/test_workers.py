"""Plain Celery apps with Postgres alone: what users of Celery rely on, on real workers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from celery import Celery, chain, chord, group
from kombu import Queue

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from celery_sidejob.transport.postgres.topology import remove_expired
from tests.tools.brokers import in_postgres
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess
from tests.transport.postgres.conftest import Tables

STOPS_S = 45
"""A warm stop of the pool prefork takes 30 seconds now and then: billiard waits for results that nobody reads."""
POOLS = ["prefork", "solo", "threads", "gevent"]


@pytest.fixture
def backend_url(database_url: str) -> str:
    """Celery's result backend in the same database."""
    return f"db+{urlsplit(database_url)._replace(scheme='postgresql+psycopg').geturl()}"


@pytest.fixture
def app(broker_url: str, backend_url: str) -> Iterator[Celery]:
    """A client of the same app."""
    with Celery("canvas", broker=broker_url, backend=backend_url, set_as_current=False) as made:
        made.conf.result_chord_retry_interval = 0.1
        yield made


@pytest.fixture
def start(processes: Processes, broker_url: str, backend_url: str, record: Record) -> Any:
    """Starts a worker with a pool."""
    env = {"BROKER_URL": broker_url, "RESULT_BACKEND": backend_url, **record.env}

    def started(pool: str = "prefork", **options: Any) -> WorkerProcess:
        options = {"concurrency": 2, **options}
        return processes.start_worker("tests.transport.postgres.canvas_app", env=env, pool=pool, **options)

    return started


@pytest.mark.few(2)
@pytest.mark.parametrize("pool", POOLS)
def test_tasks_retries_and_canvas(app: Celery, start: Any, tables: Tables, pool: str) -> None:
    worker = start(pool)
    add, total, again, fail = (app.signature(name) for name in ("add", "total", "again", "fail"))
    results = [
        (add.clone((1, 2)).delay(), 3),
        (chain(add.clone((1, 2)), add.clone((3,)), add.clone((4,)))(), 10),
        (group(add.clone((number, 1)) for number in range(5))(), [1, 2, 3, 4, 5]),
        (chord([add.clone((number, number)) for number in range(5)])(total), 20),
        (again.clone((0.2,)).delay(), 2),
    ]
    for result, expected in results:
        assert result.get(timeout=30) == expected
    with pytest.raises(ValueError, match="on purpose"):
        fail.delay().get(timeout=10)
    wait_until(lambda: tables.all == 0, message="all to be acknowledged")
    worker.terminate()
    assert worker.wait(STOPS_S) == 0
    assert tables.consumers == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("pool", POOLS)
def test_a_task_with_an_eta_waits_in_postgres(
    app: Celery, start: Any, tables: Tables, record: Record, pool: str
) -> None:
    start(pool)
    eta = datetime.now(UTC) + timedelta(seconds=3)
    app.send_task("note", ("due",), eta=eta)
    app.send_task("note", ("far",), eta=datetime.now(UTC) + timedelta(days=365))
    app.send_task("note", ("now",))
    record.wait_for("now")
    (due,) = record.wait_for("due")
    assert 0 <= due["at"] - eta.timestamp() < 2
    assert datetime.fromisoformat(due["eta"]) == eta, "as on any broker"
    wait_until(lambda: tables.all == 1, message="only the far one to be left")
    assert tables.one("SELECT due_at > now() + interval '364 days' FROM broker_messages")
    assert tables.held == 0, "no worker holds it"


def test_inspect_shows_what_waits_in_the_queues_of_the_worker(app: Celery, start: Any) -> None:
    soon, later = (datetime.now(UTC) + timedelta(hours=hours) for hours in (1, 2))
    app.send_task("add", (1, 2), {"more": [3]}, eta=later, task_id="later", priority=7)
    app.send_task("unknown", (object(),), eta=soon, task_id="soon", serializer="pickle", argsrepr="(an object,)")
    app.send_task("add", (1, 2), eta=soon, task_id="elsewhere", queue="other")
    worker = start("solo")

    found = app.control.inspect(timeout=5, limit=1).scheduled()[worker.nodename]

    assert [one["request"]["id"] for one in found] == ["soon", "later"]
    assert [datetime.fromisoformat(one["eta"]) for one in found] == [soon, later]
    assert [one["priority"] for one in found] == [0, 7]
    assert found[0]["request"]["args"] == "(an object,)"
    request = found[1]["request"]
    assert (request["name"], request["args"], request["kwargs"]) == ("add", [1, 2], {"more": [3]})
    assert (request["delivery_info"]["routing_key"], request["acknowledged"]) == ("celery", False)


@pytest.mark.few(3)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("task", ["hold", "hold_early"])
def test_a_worker_may_prefetch_nothing(
    processes: Processes, broker_url: str, client: Celery, record: Record, tables: Tables, pool: str, task: str
) -> None:
    concurrency = 1 if pool == "solo" else 2
    settings = json.dumps({"worker_disable_prefetch": True, "worker_prefetch_multiplier": 4})
    env = {"BROKER_URL": broker_url, "SETTINGS": settings, **record.env}
    for _ in range(6):
        client.send_task(task)
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool=pool, concurrency=concurrency)
    record.wait_for("begun", count=concurrency)
    wait_until(lambda: tables.waiting == 6 - concurrency, message="the others to wait")
    client.send_task("early", (0,), priority=9)
    record.note("go")
    record.wait_for("early")
    wait_until(lambda: len(record.of("ended")) == 6 and tables.all == 0, timeout=20, message="all to end")
    events = [line["event"] for line in record.read()]
    assert events[: events.index("early")].count("begun") <= concurrency + 1, "it was among the next to be fetched"
    assert "only supported" not in worker.log()


def test_the_time_of_a_message_in_the_past_is_now(app: Celery, start: Any, record: Record) -> None:
    start()
    app.send_task("note", ("late",), eta=datetime.now(UTC) - timedelta(hours=1))
    record.wait_for("late")


@pytest.mark.few(0)
def test_a_worker_with_eventlet_ends_at_once_and_says_why(
    processes: Processes, broker_url: str, record: Record, tables: Tables
) -> None:
    env = {"BROKER_URL": broker_url, **record.env}
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="eventlet", ready_timeout=None)
    assert worker.wait(20) != 0
    assert "sidejobpg:// cannot be consumed with eventlet" in worker.log()
    assert "Use --pool=gevent or --pool=threads." in worker.log()
    assert tables.consumers == 0


def test_control_and_events(app: Celery, start: Any, record: Record, tables: Tables) -> None:
    seen: list[dict[str, Any]] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})
        with receiver.consumer_context() as (listening, *_):

            def watched(kind: str) -> bool:
                with suppress(TimeoutError):
                    listening.drain_events(timeout=0.1)
                return any(event["type"] == kind for event in seen)

            watched("")
            worker = start(extra=["-E"])
            inspect = app.control.inspect(timeout=5, limit=1)
            assert inspect.ping() == {worker.nodename: {"ok": "pong"}}
            assert list(inspect.registered()[worker.nodename]) >= ["add"]
            stats = inspect.stats()[worker.nodename]
            assert stats["broker"]["transport"] == "sidejobpg"
            app.control.rate_limit("note", "1/h", reply=True, timeout=5, limit=1)
            for event in ("limited1", "limited2"):
                app.send_task("note", (event,))
            record.wait_for("limited1")
            app.control.revoke("revoked", reply=True, timeout=5, limit=1)
            assert inspect.revoked() == {worker.nodename: ["revoked"]}
            app.send_task("add", (1, 2), task_id="revoked")
            app.send_task("add", (1, 2))
            wait_until(lambda: watched("task-succeeded"), message="it to be announced")
            wait_until(lambda: watched("task-revoked"), message="that to be announced")
            assert record.of("limited2") == []
    assert {"worker-online", "task-received", "task-started"} <= {event["type"] for event in seen}
    names = "SELECT coalesce(string_agg(queue || ' ' || (headers::json ->> 'task'), ', '), '') FROM broker_messages"
    wait_until(lambda: tables.one(names) == "celery note", message="all others to be gone")
    worker.terminate()
    assert worker.wait(STOPS_S) == 0
    assert (tables.held, tables.waiting) == (0, 1), "the limited one is back"
    assert tables.one("SELECT count(*) FROM broker_messages WHERE queue LIKE '%%pidbox'") == 0


def test_a_worker_knows_at_once_that_somebody_listens(app: Celery, start: Any, pooled: bool) -> None:
    if pooled:
        pytest.skip("a worker that hears nothing finds out within a second")
    start("solo", extra=["-E"])  # its first events are sent to nobody
    seen: list[dict[str, Any]] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})
        with receiver.consumer_context() as (listening, *_):
            app.send_task("add", (1, 2))

            def succeeded() -> bool:
                with suppress(TimeoutError):
                    listening.drain_events(timeout=0.1)
                return any(event["type"] == "task-succeeded" for event in seen)

            wait_until(succeeded, message="it to be announced")
    assert {"task-received", "task-started"} <= {event["type"] for event in seen}


@pytest.mark.few(0)
def test_workers_with_gossip_hear_of_each_other(
    processes: Processes, broker_url: str, backend_url: str, tables: Tables
) -> None:
    """Their events go with the beats of both; that of the end of one is sent although it beats no more."""
    env = {"BROKER_URL": broker_url, "RESULT_BACKEND": backend_url}
    celery = [sys.executable, "-m", "celery", "-A", "tests.transport.postgres.canvas_app", "worker", "--pool=solo"]
    workers = {
        name: processes.start([*celery, "--loglevel=DEBUG", "-n", f"{name}@test"], env=env, name=name)
        for name in ("one", "other")
    }
    workers["one"].wait_for_log("other@test joined the party", 60)
    workers["other"].wait_for_log("one@test joined the party", 60)
    wait_until(
        lambda: tables.one("SELECT count(*) FROM broker_broadcasts WHERE routing_key = 'worker.heartbeat'") >= 4,
        timeout=30, message="both to tell of themselves again and again",
    )  # fmt: skip
    workers["other"].terminate()
    assert workers["other"].wait(STOPS_S) == 0
    workers["one"].wait_for_log("other@test left", 30)


def test_priorities_are_exact(app: Celery, start: Any, record: Record) -> None:
    for number, priority in enumerate([0, 9, 3, 3, 7, 1, 9, None, 5]):
        app.send_task("note", (f"{priority}-{number}",), priority=priority)
    start("solo", extra=["--prefetch-multiplier=1"])
    wait_until(lambda: len(record.read()) == 9, message="all to run")
    order = [line["event"] for line in record.read()]
    assert order == ["9-1", "9-6", "7-4", "5-8", "3-2", "3-3", "1-5", "0-0", "None-7"]


def test_a_purge_leaves_nothing(app: Celery, tables: Tables) -> None:
    for number in range(3):
        app.send_task("add", (number, 1))
    app.send_task("add", (1, 1), countdown=3600)
    assert app.control.purge() == 4
    assert tables.all == 0


@pytest.mark.few(0)
def test_workers_share_a_queue_and_start_and_stop_while_it_is_drained(
    app: Celery, start: Any, tables: Tables, record: Record
) -> None:
    with app.producer_pool.acquire(block=True) as producer, producer.batch():
        for number in range(400):
            app.send_task("note", (f"n{number}",), producer=producer)
    first = start()
    second = start("threads")
    wait_until(lambda: len(record.read()) > 50, message="some to have run")
    first.terminate()
    assert first.wait(STOPS_S) == 0
    wait_until(lambda: len({line["event"] for line in record.read()}) == 400, timeout=60, message="all to have run")
    wait_until(lambda: tables.all == 0, message="all to be acknowledged")
    # Celery's warm stop of prefork gives back what has ended and was not reported yet, with any broker.
    assert len(record.read()) <= 402
    assert second.alive


def test_each_queue_has_its_turn(app: Celery, start: Any, record: Record) -> None:
    for name in ("a", "b"):
        for number in range(40):
            app.send_task("note", (f"{name}{number}",), queue=name)
    start("solo", queues=["a", "b"])
    wait_until(lambda: len(record.read()) == 80, timeout=40, message="all to run")
    order = [line["event"] for line in record.read()]
    assert {event[0] for event in order[:16]} == {"a", "b"}
    assert [event for event in order if event[0] == "a"] == [f"a{number}" for number in range(40)]


def test_a_schema_of_another_name(processes: Processes, database_url: str, broker_url: str, record: Record) -> None:
    upgrade(database_url, "shop")
    settings = {"broker_transport_options": {"schema": "shop"}}
    env = {"BROKER_URL": broker_url, "SETTINGS": json.dumps(settings), **record.env}
    processes.start_worker("tests.transport.worker_app", env=env, pool="solo")
    with Celery("client", broker=broker_url, set_as_current=False, **settings) as client:
        client.send_task("note", ("there",))
        record.wait_for("there")
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM sidejob.broker_messages").fetchone() == (0,)


def test_a_worker_waits_while_its_postgres_is_away(
    processes: Processes, own_postgres: embedded.Postgres, record: Record
) -> None:
    upgrade(own_postgres.url)
    url = in_postgres(own_postgres.url)
    worker = processes.start_worker("tests.transport.worker_app", env={"BROKER_URL": url, **record.env})
    with Celery("client", broker=url, set_as_current=False) as client:
        client.send_task("note", ("before",))
        record.wait_for("before")
        own_postgres.restart()
        worker.wait_for_log("Connection to broker lost")
        client.send_task("note", ("next",))
        record.wait_for("next", timeout=30)
    worker.terminate()
    assert worker.wait(STOPS_S) == 0


def test_forked_processes_of_a_task_s_process_publish_over_connections_of_their_own(
    broker_url: str, tables: Tables
) -> None:
    with Celery("client", broker=broker_url, set_as_current=False) as app:
        app.send_task("add", (0, 0))
        children = []
        for number in (1, 2):
            child = os.fork()
            if not child:
                try:
                    app.send_task("add", (number, number))
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        app.send_task("add", (3, 3))
    assert tables.waiting == 4


def test_queues_that_nobody_uses_go(app: Celery, tables: Tables) -> None:
    queue = Queue("short", routing_key="short", expires=0.2)
    with app.connection_for_write() as connection:
        with connection.Producer() as producer:
            producer.publish(1, routing_key="short", declare=[queue])
        assert tables.waiting == 1
        link = connection.default_channel.link

        def gone() -> bool:
            remove_expired(link.run)
            return tables.all == 0

        wait_until(gone, message="it to expire")
        assert tables.one("SELECT count(*) FROM broker_queues WHERE name = 'short'") == 0
