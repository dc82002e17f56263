"""A call sends its row and makes its message meanwhile; whoever else calls is not held up by that, nor by a silence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest
import redis
from celery import Celery

from celery_sidejob import InvalidValueError, StoreUnavailableError, embedded
from celery_sidejob.operations import stores
from celery_sidejob.store.connection import own_executor, turns
from celery_sidejob.store.outbox import tasks
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.apps import make_app
from tests.tools.crash_points import Arm
from tests.tools.freezing import frozen
from tests.tools.waiting import wait_until

NOWHERE = "postgresql://127.0.0.1:1/nowhere"


@pytest.fixture
def app(own_postgres: embedded.Postgres, redis_url: str, request: pytest.FixtureRequest) -> Iterator[Celery]:
    """An app that has called a task, and so has a connection to its store; the parameter are its further stores."""
    upgrade(own_postgres.url)
    made = make_app(
        "keeping",
        broker=redis_url,
        sidejob_database_url=own_postgres.url,
        sidejob_durable_tasks=["keeping.*"],
        sidejob_failover_urls=getattr(request, "param", []),
    )
    made.send_task("keeping.one", task_id="first")
    yield made
    made.sidejob.close()
    made.close()


def queued(app: Celery) -> list[str]:
    """The ids of the tasks whose message is in the broker, the oldest first."""
    with redis.Redis.from_url(app.conf.broker_url) as client:
        return [json.loads(text)["headers"]["id"] for text in reversed(client.lrange("celery", 0, -1))]


def test_a_store_that_is_frozen_holds_a_call_for_a_bounded_time(
    app: Celery, own_postgres: embedded.Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "LONGEST_WAIT_S", 1.0)
    monkeypatch.setattr(own_executor, "IDLE_S", 600.0)  # or the connection is closed before, on a slow machine
    with frozen(own_postgres.pid):
        began = time.monotonic()
        with pytest.raises(
            StoreUnavailableError, match=r"^The store did not answer in time .* it may or may not have been applied"
        ):
            app.send_task("keeping.one", task_id="second")
        assert 1.0 <= time.monotonic() - began < 2.5
        with pytest.raises(StoreUnavailableError, match="none is asked just now"):
            app.send_task("keeping.one", task_id="third")
        assert time.monotonic() - began < 2.5

    assert queued(app) == ["first"]


def test_a_call_that_waits_for_its_row_holds_up_no_other(app: Celery, own_postgres: embedded.Postgres) -> None:
    with closing(psycopg.connect(own_postgres.url)) as other, ThreadPoolExecutor() as threads:
        other.execute(
            "INSERT INTO sidejob.messages (task_id, task, queue, publication, body, generation, check_interval)"
            " VALUES ('taken', 't', 'q', '{}', '', 1, '1 s')"
        )
        waiting = threads.submit(app.send_task, "keeping.one", task_id="taken")
        with closing(psycopg.connect(own_postgres.url, autocommit=True)) as looking:
            wait_until(lambda: looking.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone())

        for number in range(3):
            app.send_task("keeping.one", task_id=f"other {number}")

        assert not waiting.done()
        assert queued(app) == ["first", *(f"other {number}" for number in range(3))]
        other.commit()
        with pytest.raises(InvalidValueError, match="is taken"):
            waiting.result(timeout=20)


def test_a_call_makes_no_message_while_another_thread_publishes(
    app: Celery, at: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a run publishes a continuation that makes a job, so that it waits for the process's connection."""
    monkeypatch.setattr(turns._process, "shares_one", True)
    runtime, keeps = app.sidejob.runtime, threading.Event()
    at("durable-keep:before-commit", keeps.set)
    with ThreadPoolExecutor() as threads:
        with runtime.publisher._connection.lock:
            calling = threads.submit(app.send_task, "keeping.one", task_id="second")
            assert keeps.wait(20)
            assert runtime.connections.transact("read", lambda executor: tasks.read(executor, "second")) is not None
            assert queued(app) == ["first"]
        calling.result(timeout=20)

    assert queued(app) == ["first", "second"]


def test_many_threads_call_at_once(app: Celery, own_postgres: embedded.Postgres) -> None:
    ids = {f"{thread} {number}" for thread in range(6) for number in range(30)}
    start = threading.Barrier(6)

    def call(thread: int) -> None:
        start.wait()
        for number in range(30):
            app.send_task("keeping.one", task_id=f"{thread} {number}")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(call, range(6)))

    app.sidejob.runtime.connections.write_behind_now()
    assert sorted(queued(app)) == sorted([*ids, "first"])
    with closing(psycopg.connect(own_postgres.url)) as looking:
        assert looking.execute("SELECT count(*) FROM sidejob.messages WHERE published_at IS NULL").fetchone() == (0,)
