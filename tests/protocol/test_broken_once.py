"""What an attempt to break the promises found, each as it was broken."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import Session

from celery_sidejob import RunningJob, Status
from celery_sidejob.hooks.jobs import run
from celery_sidejob.operations.runs import recovery
from celery_sidejob.services.sweep.sweeper import Sweeper
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.pooled_too


def engine_of(stage: Stage) -> Engine:
    url = stage.database_url.replace("postgresql://", "postgresql+psycopg://")
    return create_engine(url, connect_args={"prepare_threshold": None})


def row(stage: Stage, job: Any, column: str) -> Any:
    return stage.sql(f"SELECT {column} FROM jobs WHERE id = %s", job.id)[0][0]


def test_a_claim_committed_after_its_worker_was_forgotten_is_rescued(stage: Stage) -> None:
    job = stage.job()
    worker = stage.new_worker()
    assert stage.claim(job, worker_id=worker) is not None
    stage.sql("DELETE FROM workers WHERE id = %s", worker)
    Sweeper(stage.runtime).run_once()
    assert stage.run(job) == "completed"


def test_a_body_that_raises_a_base_exception_fails_its_job(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise asyncio.CancelledError("not an Exception")

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    with pytest.raises(asyncio.CancelledError):
        stage.perform(hold)
    assert job.refresh().status == Status.FAILED


def test_what_a_commit_inside_an_abandoned_block_applied_is_not_applied_again(stage: Stage) -> None:
    engine = engine_of(stage)

    def body(job: RunningJob) -> None:
        job.output("o").write("once")
        with suppress(ZeroDivisionError), Session(engine) as session, job.unit(transaction=session):
            job.checkpoint()
            1 / 0  # noqa: B018

    job = stage.job(body)
    assert stage.run(job) == "completed"
    assert list(job.output("o")) == ["once"]
    engine.dispose()


def test_packets_taken_in_an_abandoned_block_are_freed_and_their_reader_asked(stage: Stage) -> None:
    engine = engine_of(stage)
    reader = stage.job()
    stage.run(reader)
    with stage.sidejob.port_options(notify=False):
        reader.input("a").write("p")

    def body(job: RunningJob) -> None:
        with suppress(ZeroDivisionError), Session(engine) as session, job.unit(transaction=session):
            assert stage.sidejob.get(reader.id).input("a").read() == "p"
            1 / 0  # noqa: B018

    assert stage.run(stage.job(body)) == "completed"
    assert reader.refresh().status == Status.QUEUED
    engine.dispose()


def test_a_terminated_parent_hands_a_borrowed_termination_down(stage: Stage) -> None:
    parent = stage.job()
    child = parent.enqueue("stage.idle", child_name="c")
    stage.drain()
    parent.terminate()
    stage.drain()
    with stage.connect(autocommit=False) as connection:
        parent.terminate(recursive=True, transaction=connection)
    stage.drain()
    assert child.refresh().status == Status.TERMINATED


@pytest.mark.parametrize("lent", [True, False])
def test_a_forced_timer_set_after_a_termination_is_kept(stage: Stage, lent: bool) -> None:
    other = stage.job()
    stage.drain()
    if lent:
        with stage.connect(autocommit=False) as connection:
            other.terminate(transaction=connection)
            other.run(force=True, countdown=3600, transaction=connection)
    else:

        def body(job: RunningJob) -> None:
            shown = stage.sidejob.get(other.id)
            shown.terminate()
            shown.run(force=True, countdown=3600)

        assert stage.run(stage.job(body)) == "completed"
    stage.drain()
    assert stage.sql("SELECT ask FROM timers WHERE job_id = %s", other.id) == [("force",)]
    assert row(stage, other, "status") == Status.QUEUED


def test_a_plain_run_noted_during_the_shutdown_revives_nothing(stage: Stage) -> None:
    job = stage.job()
    stage.drain()
    job.terminate()
    hold = stage.claim(job)
    assert hold is not None
    with stage.connect(autocommit=False) as connection:
        job.run(transaction=connection)
    stage.perform(hold)
    stage.drain()
    assert job.refresh().status == Status.TERMINATED


@pytest.mark.few(1)
def test_one_locked_job_does_not_keep_back_the_timers_of_others(stage: Stage) -> None:
    busy, other = stage.job(), stage.job()
    stage.drain()
    with psycopg.connect(direct(stage.database_url)) as locking, stage.connect(autocommit=False) as connection:
        for number in range(250):
            busy.input("a").write(number, transaction=connection)
        other.run(transaction=connection)
        locking.execute("SELECT FROM sidejob.jobs WHERE id = %s FOR NO KEY UPDATE", [busy.id])
        connection.commit()
        Sweeper(stage.runtime).run_once()
        assert row(stage, other, "status") == Status.QUEUED
    stage.drain()


@pytest.mark.parametrize("masked", [False, True])
def test_the_end_of_its_process_is_not_the_failure_of_a_job(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    """A cold stop strikes in the middle of our statement: the connection is gone, so nothing can be rolled back."""
    engine = engine_of(stage)

    @event.listens_for(engine, "before_cursor_execute")
    def strike(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "unit_no + 1" in statement:
            connection.invalidate()
            raise SystemExit(1)

    def body(job: RunningJob) -> None:
        try:
            with Session(engine) as session, job.unit(transaction=session):
                job.set(reached=True)
        finally:
            if masked:
                raise ConnectionError("the user's own block cannot roll back either")

    monkeypatch.setattr(run, "worker_is_stopping", lambda: True)
    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    with pytest.raises(SystemExit):
        stage.perform(hold)
    assert row(stage, job, "status") == "running"
    # Until the server knows that the connection is gone, the job is locked.
    wait_until(lambda: recovery.release(stage.runtime, job.id, run_no=1, worker_id=stage.worker_id))
    assert (job.refresh().status, len(stage.sidejob.dead)) == ("queued", 0)
    engine.dispose()


def test_adopting_in_a_lent_unit_is_refused(stage: Stage) -> None:
    engine = engine_of(stage)
    orphan = stage.job()

    def body(job: RunningJob) -> None:
        with Session(engine) as session, job.unit(transaction=session):
            job.adopt(stage.sidejob.get(orphan.id), "c")

    job = stage.job(body)
    with pytest.raises(Exception, match="cannot be part of"):
        stage.run(job)
    engine.dispose()


def test_adopting_and_terminating_recursively_in_one_unit(stage: Stage) -> None:
    orphan = stage.job()
    below = orphan.enqueue("stage.idle", child_name="below")
    stage.drain()

    def body(job: RunningJob) -> None:
        job.adopt(stage.sidejob.get(orphan.id), "adopted")
        job.terminate(recursive=True)

    job = stage.job(body)
    stage.run(job)
    stage.drain()
    assert {job.refresh().status, orphan.refresh().status, below.refresh().status} == {Status.TERMINATED}
