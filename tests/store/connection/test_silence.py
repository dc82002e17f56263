"""A store that takes a connection and a statement, and says nothing: nobody waits for it without end."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier, Event, Thread
from typing import Any

import psycopg
import pytest
from psycopg import sql

from celery_sidejob import Job, RunningJob, StoreUnavailableError, embedded
from celery_sidejob.inspection.jobs import JobViews
from celery_sidejob.jobs import creation
from celery_sidejob.operations import stores
from celery_sidejob.store.connection import bounded, opening, own_executor
from celery_sidejob.store.errors import NoAnswer
from celery_sidejob.store.schema.migrate import upgrade
from celery_sidejob.store.statement import Statement
from tests.tools.crash_points import Arm
from tests.tools.freezing import frozen
from tests.tools.in_process import Stage
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

SILENT_S, ANSWERS_S = 0.5, 2.0
BOUND_S = SILENT_S + ANSWERS_S + 3.0
"""What a call may take here; the machine may be slow."""
LEASE_S = 2.0
ONE = Statement("SELECT 1 AS one")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have silence told sooner than in production."""
    monkeypatch.setattr(bounded, "SILENT_S", SILENT_S)
    monkeypatch.setattr(opening, "ANSWERS_S", ANSWERS_S)
    monkeypatch.setattr(stores, "LONGEST_WAIT_S", SILENT_S + ANSWERS_S)


@pytest.fixture
def proxy(database_url: str) -> Iterator[TcpProxy]:
    """What stands between the app and its store."""
    with TcpProxy.to(database_url) as made:
        yield made


def stage_at(url: str, outside: str, *, lease_s: float = LEASE_S) -> Stage:
    """An app that gives up a connect as soon as libpq can."""
    url += ("&" if "?" in url else "?") + "connect_timeout=2"
    return Stage(url, outside=outside, sidejob_lease=lease_s, sidejob_heartbeat_interval=LEASE_S / 8)


@pytest.fixture
def stage(database_url: str, proxy: TcpProxy) -> Iterator[Stage]:
    """An app whose store may fall silent."""
    with closing(stage_at(proxy.url_for(database_url), database_url)) as made:
        yield made


def connect(stage: Stage, number: int) -> None:
    """Have so many connections that are open and idle."""
    together = Barrier(number)

    def look(executor: Any) -> None:
        together.wait(30)
        executor.run(ONE)

    with ThreadPoolExecutor(number) as threads:
        for done in [threads.submit(stage.runtime.connections.transact, "look", look) for _ in range(number)]:
            done.result()


def calls(stage: Stage, job: Job, other: Job) -> dict[str, Callable[[], Any]]:
    """What a client may ask."""
    port, sidejob = job.input("a"), stage.sidejob
    return {
        "enqueue": lambda: sidejob.enqueue("stage.idle"),
        "enqueue with a port": lambda: sidejob.enqueue("stage.idle", inports=["b"]),
        "enqueue_many": lambda: sidejob.enqueue_many([{"task": "stage.idle"}] * 3),
        "enqueue a child": lambda: job.enqueue("stage.idle", child_name="child"),
        "find": lambda: sidejob.find(job.id),
        "find by alias": lambda: sidejob.find("alias"),
        "for_task_id": lambda: sidejob.for_task_id(str(job.task_id)),
        "jobs": lambda: sidejob.jobs(status="failed"),
        "count_jobs": sidejob.count_jobs,
        "refresh": job.refresh,
        "wait": lambda: job.wait(timeout=60),
        "run": job.run,
        "terminate": lambda: job.terminate(recursive=True),
        "delete": job.delete,
        "children": lambda: job.children,
        "adopt": lambda: job.adopt(other, "other"),
        "aliases": lambda: job.aliases,
        "add_alias": lambda: job.add_alias("new"),
        "state": lambda: job.state,
        "set": lambda: job.set(a=1),
        "write": lambda: port.write(1),
        "read": port.read,
        "length": lambda: len(port),
        "default": lambda: setattr(port, "default", 1),
        "channels": lambda: port.channels,
        "publish": lambda: sidejob.publish("/c", 1),
        "dead": lambda: len(sidejob.dead),
        "dead.list": lambda: sidejob.dead.list(),
        "dead.retry_all": lambda: sidejob.dead.retry_all(task="none"),
        "stats": sidejob.stats,
        "show": lambda: JobViews(stage.runtime).details(job),
    }


def test_no_call_of_a_client_waits_for_a_silent_store_without_end(stage: Stage, proxy: TcpProxy) -> None:
    job, other = stage.job(aliases=["alias"]), stage.job()
    asked = calls(stage, job, other)
    for name in ("find", "write", "stats", "dead"):  # so that nothing is to be found out any more
        asked[name]()
    connect(stage, len(asked))
    proxy.black_hole()

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        began = time.monotonic()
        try:
            outcome = call()
        except Exception as error:
            outcome = error
        return time.monotonic() - began, outcome

    with ThreadPoolExecutor(len(asked)) as threads:
        took = dict(zip(asked, threads.map(timed, asked.values()), strict=True))
    assert {
        name: outcome for name, (_, outcome) in took.items() if not isinstance(outcome, StoreUnavailableError)
    } == {}
    assert {name: seconds for name, (seconds, _) in took.items() if seconds > BOUND_S} == {}
    proxy.pass_through()
    assert other.refresh().status == "queued"


def test_a_connection_of_a_threads_own_does_not_wait_without_end(stage: Stage, proxy: TcpProxy) -> None:
    own = stage.runtime.connections.connect()
    proxy.black_hole()
    began = time.monotonic()
    with pytest.raises(psycopg.OperationalError, match="no answer in time"):
        own.run(ONE)
    assert SILENT_S < time.monotonic() - began < BOUND_S
    assert own.broken


def test_a_row_that_somebody_has_locked_is_waited_for(stage: Stage, proxy: TcpProxy) -> None:
    job = stage.job()
    with ThreadPoolExecutor(1) as threads, stage.connect(autocommit=False) as locker:
        locker.execute("SELECT FROM jobs FOR UPDATE")
        before = proxy.connections
        running = threads.submit(job.set, a=1)
        wait_until(lambda: proxy.connections >= before + 3, message="the store to be asked again and again")
        assert not running.done()
        locker.rollback()
        running.result(30)
    assert job.state == {"a": 1}


def test_a_store_that_takes_no_further_connection_is_not_silent(
    stage: Stage, proxy: TcpProxy, database_url: str
) -> None:
    job = stage.job()
    alter = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    name = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]))
    with (
        closing(psycopg.connect(database_url, dbname="postgres", autocommit=True)) as other,
        ThreadPoolExecutor(1) as threads,
        stage.connect(autocommit=False) as locker,
    ):
        locker.execute("SELECT FROM jobs FOR UPDATE")
        before = proxy.connections
        running = threads.submit(job.set, a=1)
        other.execute(alter.format(name, sql.SQL("false")))
        try:
            wait_until(lambda: proxy.connections >= before + 3, message="the store to refuse again and again")
        finally:
            other.execute(alter.format(name, sql.SQL("true")))
        locker.rollback()
        running.result(30)
    assert job.state == {"a": 1}


def test_an_answer_that_comes_while_the_store_is_asked_elsewhere_is_taken(database_url: str) -> None:
    with closing(bounded.BoundedConnection.connect(database_url, autocommit=True)) as slow:

        def in_vain() -> bool:
            select.select([slow.pgconn.socket], [], [], 60)
            return False

        slow.answers_elsewhere = in_vain
        assert slow.execute(f"SELECT 1 FROM pg_sleep({2 * SILENT_S})").fetchone() == (1,)


def test_a_job_is_not_made_once_more_where_the_store_said_nothing_in_time(stage: Stage) -> None:
    """A second attempt would wait as long, and the caller twice."""
    tried: list[int] = []

    def make() -> list[int]:
        tried.append(1)
        raise NoAnswer("silent")

    with pytest.raises(NoAnswer):
        creation._until_known(stage.runtime, [], make)
    assert tried == [1]


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_commit_that_a_frozen_store_applies_when_it_goes_on_is_known_and_not_repeated(
    own_postgres: embedded.Postgres, at: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(own_postgres.url)
    given_up = Event()
    real = own_executor.unknown

    def unknown(*given: Any) -> Any:
        given_up.set()
        return real(*given)

    monkeypatch.setattr(own_executor, "unknown", unknown)
    thaw: list[Thread] = []

    def freeze() -> None:
        stands = Event()

        def for_a_while() -> None:
            with frozen(own_postgres.pid):
                stands.set()
                given_up.wait(60)

        thaw.append(Thread(target=for_a_while))
        thaw[0].start()
        stands.wait(60)

    def body(job: RunningJob) -> None:
        job.output("o").write(job.run_no)
        at("checkpoint:before-commit", freeze)
        job.checkpoint()

    with closing(stage_at(own_postgres.url, own_postgres.url, lease_s=60.0)) as stage:
        job = stage.job(body)
        assert stage.run(job) == "completed"
        thaw[0].join()
        assert given_up.is_set()
        assert list(job.output("o")) == [1]


def test_a_run_whose_commit_is_not_answered_for_a_lease_is_given_up_and_begins_again(
    stage: Stage, proxy: TcpProxy
) -> None:
    def body(job: RunningJob) -> None:
        job.output("o").write(job.run_no)
        if job.run_no == 1:
            proxy.black_hole()

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    began = time.monotonic()
    stage.perform(hold)
    assert LEASE_S < time.monotonic() - began < 2 * (LEASE_S + BOUND_S)
    assert "store" in stage.ignored[job.id]
    proxy.pass_through()
    stage.declare_dead(hold.worker_id)
    stage.worker_id = stage.new_worker()
    assert stage.sidejob.poll().rescued == 1
    stage.drain()
    assert (job.refresh().status, list(job.output("o"))) == ("completed", [2])


def test_a_connection_is_closed_at_once_where_libpq_cancels_without_a_time_limit(
    stage: Stage, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libpq before version 17: its call would stop every thread for as long as the server says nothing."""
    executor = stage.sidejob.runtime.connections.connect()
    executor.connection.pgconn.send_query(b"SELECT pg_sleep(600)")
    assert executor.busy
    proxy.black_hole()
    cancelled = []
    monkeypatch.setattr(psycopg.capabilities, "has_cancel_safe", lambda: False)
    monkeypatch.setattr(psycopg.Connection, "cancel", cancelled.append)

    executor.close()

    assert (executor.broken, cancelled) == (True, [])
    proxy.pass_through()
