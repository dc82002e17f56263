"""A timer that is asked for with `transaction=`, or in a unit that is lent, counts from the commit on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_sidejob import Job, RunningJob, Status
from celery_sidejob.operations.changes.follow_up import apply_noted_asks
from celery_sidejob.operations.runs import recovery
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct

pytestmark = pytest.mark.pooled_too


def fails(job: RunningJob) -> None:
    raise ZeroDivisionError


def asked_with_hooks(stage: Stage, job: Job, **options: Any) -> None:
    """Ask in a session of SQLAlchemy's, which tells us of its commit."""
    engine = create_engine(direct(stage.database_url).replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, session.begin():
        assert job.run(**{"countdown": 3600, **options}, transaction=session) is not None
    engine.dispose()


def asked_without_hooks(stage: Stage, job: Job, **options: Any) -> None:
    """Ask in a transaction of psycopg's, which tells nobody: the sweeper finds what is noted."""
    before = job.refresh().status
    with psycopg.connect(direct(stage.database_url)) as connection:
        assert job.run(**{"countdown": 3600, **options}, transaction=connection) is not None
    assert job.refresh().status == before
    stage.sidejob.poll()


ASKED = [asked_with_hooks, asked_without_hooks]
Asks = Callable[..., None]


def timers(stage: Stage) -> list[tuple[Any, ...]]:
    return stage.sql("SELECT ask, accepted, due_at > now() FROM timers ORDER BY id")


def pass_time(stage: Stage) -> None:
    """Have all timers be due."""
    stage.sql("UPDATE timers SET due_at = now() WHERE due_at > now()")


@pytest.mark.parametrize("asks", ASKED)
def test_a_job_at_rest_is_queued_once_it_is_committed(stage: Stage, asks: Asks) -> None:
    job = stage.job()
    stage.run(job)

    asks(stage, job)

    assert job.refresh().status == Status.QUEUED
    assert timers(stage) == [("run", True, True)]
    pass_time(stage)
    assert stage.drain() == 1


@pytest.mark.parametrize("asks", ASKED)
def test_a_failure_since_then_does_not_cancel_it(stage: Stage, asks: Asks) -> None:
    job = stage.job(fails)
    asks(stage, job)

    assert stage.drain() == 1
    assert job.refresh().status == Status.FAILED

    pass_time(stage)
    assert stage.drain() == 1


def test_nor_does_the_failure_of_the_run_in_which_it_is_committed(stage: Stage) -> None:
    """Nobody was told of the commit: the end of the run finds it."""

    def body(job: RunningJob) -> None:
        stage.outside(note)
        raise ZeroDivisionError

    def note() -> None:
        with psycopg.connect(direct(stage.database_url)) as connection:
            job.run(countdown=3600, transaction=connection)

    job = stage.job(body)
    with pytest.raises(ZeroDivisionError):
        stage.run(job)

    assert timers(stage) == [("run", True, True)]
    assert job.refresh().status == Status.QUEUED
    pass_time(stage)
    assert stage.drain() == 1


def test_nor_does_the_last_loss(stage: Stage) -> None:
    task = stage.task(fails, name="noted.lost", shared=False, max_losses=1)
    job = task.enqueue()
    hold = stage.claim(job)
    assert hold is not None
    with psycopg.connect(direct(stage.database_url)) as connection:
        job.run(countdown=3600, transaction=connection)

    assert recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)

    assert job.refresh().status == Status.FAILED
    assert timers(stage) == [("run", True, True)]
    pass_time(stage)
    assert stage.drain() == 1


@pytest.mark.parametrize("own", [True, False])
def test_in_a_unit_that_is_lent_it_counts_too(stage: Stage, own: bool) -> None:
    other = stage.job()
    stage.run(other)

    def body(job: RunningJob) -> None:
        with psycopg.connect(direct(stage.database_url)) as connection:
            with job.unit(transaction=connection):
                (job if own else other).run(countdown=3600)
            connection.commit()

    asking = stage.inside(body)

    assert (asking if own else other).refresh().status == Status.QUEUED
    assert timers(stage) == [("run", True, True)]


def test_it_is_judged_when_it_is_committed(stage: Stage) -> None:
    job = stage.job(fails)
    with psycopg.connect(direct(stage.database_url)) as connection:
        job.run(countdown=3600, transaction=connection)
        stage.drain()
    stage.sidejob.poll()

    assert job.refresh().status == Status.FAILED
    assert timers(stage) == []


@pytest.mark.parametrize("asks", ASKED)
def test_a_forced_one_takes_the_job_out_of_the_dead_set_now(stage: Stage, asks: Asks) -> None:
    job = stage.job(fails)
    stage.drain()

    asks(stage, job, force=True)

    assert (job.refresh().status, len(stage.sidejob.dead)) == (Status.QUEUED, 0)
    assert timers(stage) == [("force", True, True)]


def test_the_order_in_which_they_were_noted_is_kept(stage: Stage) -> None:
    """A termination cancels what was noted before it, and not what was noted after it."""
    job = stage.job()
    stage.run(job)
    with psycopg.connect(direct(stage.database_url)) as connection:
        job.run(countdown=3600, transaction=connection)
        job.terminate(transaction=connection)
        job.run(countdown=7200, force=True, transaction=connection)
    apply_noted_asks(stage.runtime, [job.id])

    assert timers(stage) == [("force", True, True)]
    stage.drain()
    assert job.refresh().status == Status.QUEUED
    pass_time(stage)
    assert stage.drain() == 1
    assert job.refresh().status == Status.COMPLETED
