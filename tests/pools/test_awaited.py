"""Bodies of `async def` of jobs, durable tasks and plain tasks, in each pool."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_sidejob import Job
from celery_sidejob.examination import examine
from tests.tools.apps import make_app
from tests.tools.pgbouncer import direct
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

APP = "tests.pools.awaited_app"
TIMEOUT_S = 20.0
EACH = pytest.mark.parametrize("pool", ["asyncio", "prefork", "threads", "solo"])
QUICK = {"SIDEJOB_LEASE": "6", "SIDEJOB_HEARTBEAT_INTERVAL": "1", "SIDEJOB_LOST_AFTER": "2"}

Start = Callable[..., WorkerProcess]


@pytest.fixture
def app(redis_url: str, database_url: str) -> Iterator[Celery]:
    made = make_app(
        "awaited", broker=redis_url, result_backend="sidejobpg://", sidejob_database_url=database_url,
        sidejob_durable_tasks=["awaited.keep", "awaited.wait_for_go"], sidejob_lost_after=2,
    )  # fmt: skip
    yield made
    made.sidejob.close()
    made.close()


@pytest.fixture
def start(processes: Processes, redis_url: str, database_url: str, record: Record) -> Start:
    def started(pool: str, concurrency: int = 2, env: Mapping[str, str] | None = None) -> WorkerProcess:
        env = {"BROKER_URL": redis_url, "DATABASE_URL": database_url, **record.env, **QUICK, **(env or {})}
        return processes.start_worker(APP, env=env, pool=pool, concurrency=concurrency)

    return started


def send(app: Celery, task: str, *args: Any) -> AsyncResult:
    return app.send_task(f"awaited.{task}", args)


def enqueue(app: Celery, task: str, *args: Any) -> Job:
    job: Job = app.sidejob.enqueue(f"awaited.{task}", args)
    return job


@EACH
def test_jobs_with_their_hooks_and_tasks_are_awaited(start: Start, app: Celery, pool: str) -> None:
    start(pool)
    job = enqueue(app, "add_up")
    job.input("numbers").write_many([1, 2, 3])

    wait_until(lambda: job.refresh().get("total") == 6 and job.status == "completed", timeout=TIMEOUT_S)
    assert list(job.output("sums")) == [1, 3, 6]
    assert job.get("started")
    job.terminate()
    wait_until(lambda: job.refresh().status == "terminated", timeout=TIMEOUT_S)
    assert job.get("stopped")

    assert send(app, "keep", 2).get(timeout=TIMEOUT_S) == [True, 2]
    assert send(app, "plain", 7).get(timeout=TIMEOUT_S) == 7


@pytest.mark.parametrize("pool", ["asyncio", "prefork", "threads"])  # solo has no place for what it waits for
def test_a_body_awaits_the_results_of_what_it_has_asked(start: Start, app: Celery, pool: str) -> None:
    start(pool)
    for _ in range(3):
        assert send(app, "ask_others").get(timeout=TIMEOUT_S) == [1, 3]


@EACH
def test_a_killed_worker_s_bodies_go_on_behind_their_last_commit(
    start: Start, app: Celery, record: Record, pool: str
) -> None:
    worker = start(pool)
    job = enqueue(app, "add_up", 3)
    job.input("numbers").write_many([1, 2, 3])
    record.wait_for("paused")
    kept = None
    if pool != "solo":
        kept = send(app, "wait_for_go")
        record.wait_for("waiting")

    worker.kill_group()
    start(pool)
    record.wait_for("paused", count=2)
    record.note("go")

    wait_until(lambda: job.refresh().status == "completed", timeout=2 * TIMEOUT_S)
    assert list(job.output("sums")) == [1, 3, 6]
    if kept is not None:
        assert kept.get(timeout=TIMEOUT_S) == "gone"


def test_a_soft_time_limit_of_prefork_strikes_in_the_body(start: Start, app: Celery, record: Record) -> None:
    start("prefork", concurrency=1)

    assert send(app, "soft").get(timeout=TIMEOUT_S) == "heard"
    assert [line["event"] for line in record.read()] == ["cancelled", "heard"], "the group ends its tasks first"
    assert send(app, "soft_computing").get(timeout=TIMEOUT_S) == "heard"
    assert send(app, "plain", 7).get(timeout=TIMEOUT_S) == 7, "the event loop is whole"


def test_the_pool_keeps_time_limits_of_jobs(start: Start, app: Celery, record: Record) -> None:
    start("asyncio")
    job = enqueue(app, "slow")

    wait_until(lambda: job.refresh().status == "failed", timeout=TIMEOUT_S)
    (entry,) = app.sidejob.dead
    assert "TimeLimitExceeded" in entry.error
    assert len(record.of("slow")) == 1


def test_the_pool_cancels_a_revoked_run(start: Start, app: Celery, record: Record) -> None:
    start("asyncio", concurrency=1)
    job = enqueue(app, "rest")
    record.wait_for("resting")

    app.control.revoke(job.task_id, terminate=True)

    record.wait_for("cancelled")
    wait_until(lambda: job.refresh().status == "failed", timeout=TIMEOUT_S)
    with pytest.raises(TaskRevokedError):
        job.result.get(timeout=TIMEOUT_S)
    assert send(app, "plain", 7).get(timeout=TIMEOUT_S) == 7


def test_a_cold_stop_gives_runs_back(start: Start, app: Celery, record: Record) -> None:
    worker = start("asyncio")
    job = enqueue(app, "rest")
    record.wait_for("resting")

    worker.send_signal(signal.SIGQUIT)

    worker.wait(TIMEOUT_S)
    assert record.of("cancelled")
    assert job.refresh().status == "queued"
    start("asyncio")
    wait_until(lambda: job.refresh().status == "completed", timeout=TIMEOUT_S)
    assert job.info["losses"] == 0


def test_doctor_names_the_line_that_has_blocked_the_loop(start: Start, app: Celery) -> None:
    start("asyncio")
    blocking = send(app, "block")
    assert blocking.get(timeout=TIMEOUT_S) is None

    def found() -> list[str]:
        return [one.found for one in examine(app.sidejob, thorough=False) if one.check == "event loop"]

    wait_until(found, timeout=TIMEOUT_S)
    (told,) = found()
    assert f"awaited.block[{blocking.id}] is in block, line " in told
    assert "awaited_app.py" in told


def test_gevent_says_which_pools_can_run_it(start: Start, app: Celery) -> None:
    worker = start("gevent")
    job = enqueue(app, "rest")

    wait_until(lambda: job.refresh().status == "failed", timeout=TIMEOUT_S)
    worker.wait_for_log("is an async def, which the pool gevent cannot run")


@pytest.fixture
def invoices(database_url: str) -> Iterator[Callable[[], list[int]]]:
    """A table of the bodies' own, and what is in it."""
    with psycopg.connect(direct(database_url), autocommit=True) as connection:
        connection.execute("CREATE TABLE public.invoices (number int)")
        yield lambda: [number for (number,) in connection.execute("SELECT number FROM public.invoices ORDER BY 1")]


@pytest.mark.parametrize(
    ("point", "charges"),
    [
        ("step[charge]:before-commit", [3, 3, -3]),
        ("step[charge]:after-commit", [3, -3]),
        ("step[invoice]:before-commit", [3, -3]),
        ("step[invoice]:after-commit", [3, -3]),
        ("step[send]:before-commit", [3, -3, -3]),
        ("step[send]:after-commit", [3, -3]),
    ],
)
def test_a_worker_is_killed_around_each_commit_of_an_awaited_step(
    start: Start, app: Celery, record: Record, invoices: Callable[[], list[int]], point: str, charges: list[int]
) -> None:
    worker = start("asyncio", env={"SIDEJOB_CRASH_POINTS": f"{point}=kill"})
    job = enqueue(app, "order", 3)
    assert worker.wait(TIMEOUT_S) == -9
    start("asyncio")
    wait_until(lambda: job.refresh().status == "completed", timeout=3 * TIMEOUT_S)
    assert invoices() == [3]
    assert [line["number"] for line in record.of("charged")] == charges


def test_a_hundred_bodies_in_steps_outlive_their_worker(
    start: Start, app: Celery, record: Record, invoices: Callable[[], list[int]]
) -> None:
    worker = start("asyncio", concurrency=100)
    jobs = [enqueue(app, "order", number) for number in range(1, 101)]
    wait_until(lambda: len(invoices()) >= 10, timeout=TIMEOUT_S, message="some of them to be under way")
    worker.kill_group()
    start("asyncio", concurrency=100)
    wait_until(lambda: app.sidejob.count_jobs() == {"completed": 100}, timeout=5 * TIMEOUT_S)
    assert invoices() == [*range(1, 101)], "each row is there once"
    assert len({step["number"] for step in record.of("charged")}) == 200
    assert all(job.refresh().info["losses"] == 0 for job in jobs)


def test_the_loop_goes_on_while_the_end_of_a_body_waits_for_the_store(
    start: Start, app: Celery, record: Record, database_url: str
) -> None:
    start("asyncio", concurrency=10)
    job = enqueue(app, "until_go")
    record.wait_for("waiting")
    waiters = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(direct(database_url)) as held, psycopg.connect(direct(database_url), autocommit=True) as look:
        held.execute("SELECT 1 FROM sidejob.jobs WHERE id = %s FOR UPDATE", [job.id])
        record.note("go")
        wait_until(lambda: look.execute(waiters).fetchall() != [(0,)], timeout=TIMEOUT_S, message="the end to wait")
        assert send(app, "plain", 7).get(timeout=TIMEOUT_S) == 7
        assert look.execute(waiters).fetchall() != [(0,)], "it still waits"
    wait_until(lambda: job.refresh().status == "completed", timeout=TIMEOUT_S)
    assert job.get("gone")


def test_the_loop_goes_on_while_a_body_that_is_given_up_commits(start: Start, app: Celery, record: Record) -> None:
    worker = start("asyncio", concurrency=10)
    job = enqueue(app, "commit")
    record.wait_for("committing")
    app.control.revoke(job.task_id, terminate=True)
    worker.wait_for_log("and is given up")

    assert send(app, "plain", 7).get(timeout=TIMEOUT_S) == 7
    record.note("go")
    wait_until(lambda: job.refresh().status == "failed", timeout=TIMEOUT_S)
