"""Crash points for users' tests: in this process, and in real workers."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from celery_sidejob import InvalidValueError, RunningJob
from celery_sidejob.testing import assert_step, crash_after, crash_before, move_clock, run_job, run_until_quiet
from celery_sidejob.testing.crashes import POINTS
from tests.testing.test_testing_page import run_pytest
from tests.tools.in_process import Stage


def add_up(job: RunningJob) -> None:
    """Adds numbers, one to a commit."""
    total = job.get("total", 0)
    for number in job.for_inputs("numbers"):
        total += number
        job.set(total=total)


@pytest.mark.parametrize(
    ("crashes", "done"),
    [
        (crash_before("claim"), 0),
        (crash_after("claim"), 0),
        (crash_before("commit"), 0),
        (crash_after("commit"), 1),
        (crash_before("commit", count=2), 1),
        (crash_after("commit", count=2), 3),
        (crash_before("end"), 3),
    ],
)
def test_a_run_dies_at_a_point_and_is_rescued(stage: Stage, crashes: Any, done: int) -> None:
    job = stage.job(add_up)
    job.input("numbers").write_many([1, 2])

    with crashes:
        run_job(job)
    assert job.refresh().get("total", 0) == done

    run_until_quiet(stage.sidejob)
    assert job.refresh().status == "completed"
    assert job.get("total") == 3


def test_who_has_died_after_the_last_commit_left_nothing_to_rescue(stage: Stage) -> None:
    job = stage.job(add_up)
    with crash_after("end"):
        run_job(job)
    assert job.refresh().status == "completed"
    assert run_until_quiet(stage.sidejob) == 0


@pytest.mark.parametrize(("crash", "there"), [(crash_before, []), (crash_after, [1])])
def test_the_commit_of_a_unit_in_the_caller_s_transaction_is_a_point(
    stage: Stage, crash: Any, there: list[int]
) -> None:
    stage.sql("CREATE TABLE public.crash_rows (n int)")
    engine = create_engine(stage.database_url.replace("postgresql://", "postgresql+psycopg://"))

    def body(job: RunningJob) -> None:
        for number in job.for_inputs("numbers"):
            with engine.begin() as connection, job.unit(transaction=connection):
                connection.exec_driver_sql("INSERT INTO public.crash_rows VALUES (%s)", (number,))

    def rows() -> list[int]:
        return [n for (n,) in stage.sql("SELECT n FROM public.crash_rows ORDER BY n")]

    try:
        job = stage.job(body)
        job.input("numbers").write_many([1, 2])
        with crash("commit"):
            run_job(job)
        assert rows() == there
        run_until_quiet(stage.sidejob)
        assert rows() == [1, 2]
    finally:
        engine.dispose()
        stage.sql("DROP TABLE public.crash_rows")


@pytest.mark.parametrize(
    ("crashes", "charged", "kept"),
    [
        (crash_before("step:charge"), 2, False),
        (crash_after("step:charge"), 1, True),
        (crash_after("step", count=2), 1, True),
        (crash_before("step:pack"), 1, True),
    ],
)
def test_a_run_dies_at_a_step(stage: Stage, crashes: Any, charged: int, kept: bool) -> None:
    charges = []

    def body(job: RunningJob) -> None:
        job.step("charge", lambda: charges.append(job.run_no))
        job.step("pack", dict, weight=3)
        job.sleep("rest", seconds=60)

    job = stage.job(body)
    with crashes:
        run_job(job)
    assert any(str(step) == "charge" for step in job.steps) == kept
    run_until_quiet(stage.sidejob)
    assert len(charges) == charged
    assert assert_step(job, "pack", {"weight": 3}).tries == 1
    with pytest.raises(AssertionError, match="has no step 'ship'; it has: charge "):
        assert_step(job, "ship")
    with pytest.raises(AssertionError, match="is not done with 7; the steps are: charge "):
        assert_step(job, "pack", 7)


def test_a_step_that_has_failed_is_not_done(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        with suppress(TypeError):
            job.step("charge", int, None)  # the error says None, as an error= that was not given would
        job.step("pack", str)
        job.sleep("rest", seconds=60)

    job = stage.job(body)
    stage.run(job)
    assert assert_step(job, "charge", error="TypeError: int() argument").value is None
    for name, error, says in (
        ("charge", None, "is not done"),
        ("charge", "declined", "is not failed with 'declined'"),
        ("pack", "declined", "is not failed with 'declined'"),
        ("rest", None, "is not done"),
    ):
        with pytest.raises(AssertionError, match=f"Step '{name}' of .* {says}; the steps are: charge "):
            assert_step(job, name, error=error)


@pytest.mark.parametrize(("crash", "kept", "charged"), [(crash_before, False, 2), (crash_after, True, 1)])
def test_an_eager_run_dies_at_a_step_and_is_rescued(stage: Stage, crash: Any, kept: bool, charged: int) -> None:
    stage.app.conf.task_always_eager = True
    charges: list[int] = []

    @stage.task(name="eager.child")
    def pack(job: RunningJob) -> str:
        return "parcel"

    @stage.task(name="eager.parent", inports=["answers"])
    def order(job: RunningJob) -> None:
        job.step("charge", charges.append, 1)
        job.call("pack", pack)
        job.sleep("cool off", days=3)
        job.receive("answers")

    with crash("step:charge"):
        order.apply_async(aliases=["order"])
    job = stage.sidejob.get("order")
    assert job.status == "running"
    assert [str(step) for step in job.steps] == (["charge"] if kept else [])

    run_until_quiet(stage.sidejob)
    assert len(charges) == charged
    assert_step(job, "pack", "parcel")
    with pytest.raises(AssertionError, match=r"'cool off' of .* is not done; .* cool off .waits"):
        assert_step(job, "cool off")
    move_clock(timedelta(days=3), sidejob=stage.sidejob)
    run_until_quiet(stage.sidejob)
    assert_step(job, "cool off")
    job.input("answers").write("yes")
    assert job.refresh().status == "completed", "in eager mode the write has run it"
    with pytest.raises(AssertionError, match=r"has no step 'charge'; it has: none\. Its steps went into its history"):
        assert_step(job, "charge")


def test_the_run_of_a_process_that_is_gone_is_rescued_at_once(stage: Stage) -> None:
    job = stage.job(add_up)
    job.input("numbers").write(1)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    worker = stage.new_worker()
    ident = f"{socket.gethostname()}:{gone.pid}:a-killed-one"
    stage.sql("UPDATE workers SET ident = %s WHERE id = %s", ident, worker)
    assert stage.claim(job, worker_id=worker) is not None

    assert run_until_quiet(stage.sidejob) == 1
    assert (job.refresh().status, job.get("total")) == ("completed", 1)


def test_nothing_is_written_on_the_way_out(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        try:
            job.set(first=True)
            job.checkpoint()
        finally:
            if job.run_no == 1:
                job.set(last_words=True)
                job.checkpoint()

    job = stage.job(body)
    with crash_after("commit"):
        run_job(job)
    assert (job.refresh().status, job.state) == ("running", {"first": True})
    assert stage.sql("SELECT dead_at IS NOT NULL FROM workers ORDER BY id DESC LIMIT 1") == [(True,)]

    assert run_job(job).state == {"first": True}
    assert job.refresh().status == "completed"


def test_a_run_that_dies_counts_as_lost(stage: Stage) -> None:
    job = stage.job(add_up)
    for _ in range(stage.sidejob.settings.max_losses):
        with crash_after("claim"):
            run_job(job)
    assert run_until_quiet(stage.sidejob) == 0
    assert job.refresh().status == "failed"
    assert [entry.reason for entry in stage.sidejob.dead] == ["lost"]


@pytest.mark.parametrize(("on_lost", "runs"), [("requeue", ["one", "one"]), ("dead", ["one"])])
def test_a_durable_task_dies_too(stage: Stage, on_lost: str, runs: list[str]) -> None:
    ran = []

    @stage.app.task(name="shop.mail", durable=True, on_lost=on_lost, shared=False)
    def mail(to: str) -> None:
        ran.append(to)

    mail.delay("one")
    with crash_before("end"):
        run_until_quiet(stage.sidejob)
    assert ran == ["one"]
    run_until_quiet(stage.sidejob)
    assert ran == runs
    assert len(stage.sidejob.dead) == (on_lost == "dead")
    assert stage.row_counts()["messages"] == 0


def test_a_client_dies_around_its_commit_and_before_the_message_goes(stage: Stage) -> None:
    with crash_before("enqueue"):
        stage.job(add_up)
    assert stage.sidejob.jobs() == []

    with crash_before("publish"):
        stage.job(add_up)
    with crash_after("enqueue"):
        stage.job(add_up)
    assert [str(job.status) for job in stage.sidejob.jobs()] == ["queued", "queued"]
    assert run_until_quiet(stage.sidejob) == 2


def test_a_point_that_nobody_reaches_fails_the_test(stage: Stage) -> None:
    job = stage.job(add_up)
    with pytest.raises(AssertionError, match=r"crash_after\('commit'\): .* not come to this point 2 times\. A worker"):
        with crash_after("commit", count=2):
            run_job(job)
    assert job.refresh().status == "completed"


def test_what_the_block_raises_is_raised(stage: Stage) -> None:
    with pytest.raises(ZeroDivisionError), crash_after("commit", count=2):
        run_job(stage.job(lambda job: 1 / 0))
    with crash_after("enqueue"):  # the block before is over
        stage.job()


@pytest.mark.parametrize(
    ("point", "options", "message"),
    [
        (
            "comit",
            {},
            "no crash point 'comit'; there are enqueue, claim, commit, step, end, publish. Did you mean 'commit'",
        ),
        (None, {}, "no crash point None"),
        ("commit", {"count": 0}, "count of a crash point is a number from 1 on, not 0"),
        ("commit", {"timeout": "long"}, "timeout of a crash point is seconds, not 'long'"),
    ],
)
def test_a_wrong_point_is_named(point: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message), crash_after(point, **options):
        pass


def test_blocks_are_not_nested() -> None:
    with pytest.raises(RuntimeError, match="cannot be nested"), crash_after("commit"), crash_before("end"):
        pass


SHOP = """
from celery import Celery
from celery_sidejob import SideJob, sidejob_task

app = Celery("shop", broker="redis://127.0.0.1:1/0")
app.conf.sidejob_database_url = "postgresql://127.0.0.1:1/shop"
SideJob(app)

@sidejob_task(inports=["numbers"])
def add_up(job):
    total = job.get("total", 0)
    for number in job.for_inputs("numbers"):
        total += number
        job.set(total=total)
"""
TESTS = """
import pytest
from celery_sidejob.testing import assert_step, crash_after, crash_before, run_until_quiet, wait_until
from shop import add_up

@pytest.mark.parametrize(("crash", "at", "total", "pool"), [
    (crash_after, "claim", None, "prefork"), (crash_before, "end", 3, "solo"),
])
def test_a_worker_dies_at_the_point_with_all_its_processes(sidejob_workers, crash, at, total, pool):
    job = add_up.enqueue()
    job.input("numbers").write_many([1, 2])
    with crash(at):
        worker = sidejob_workers.start(pool=pool)
    assert not worker.alive
    assert not worker.pool_pids
    assert job.refresh().get("total") == total

    worker.restart()  # survives the point
    assert job.wait(timeout=60).status == "completed"
    assert job.get("total") == 3

def test_a_worker_that_never_comes_there(sidejob_workers):
    with pytest.raises(AssertionError, match="no worker came to this point within 0.5 s"):
        with crash_after("commit", timeout=0.5):
            worker = sidejob_workers.start()
    assert worker.alive

def test_what_a_killed_worker_ran_is_rescued_here_at_once(sidejob_worker, sidejob_store):
    job = add_up.enqueue()
    job.input("numbers").write_many(range(1000))
    wait_until(lambda: job.get("total"))
    sidejob_worker.kill()
    run_until_quiet(sidejob_store)
    assert job.refresh().status == "completed"
    assert job.get("total") == sum(range(1000))
"""


def test_real_workers_die(tmp_path: Path, postgres_url: str, redis_url: str) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nsidejob_app = shop:app\n")
    said = run_pytest(tmp_path, SIDEJOB_TEST_DATABASE_URL=postgres_url, SIDEJOB_TEST_REDIS_URL=redis_url)
    assert "4 passed" in said, said


def test_the_points_have_a_stated_list() -> None:
    assert POINTS == ("enqueue", "claim", "commit", "step", "end", "publish")
