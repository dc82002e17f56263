"""A job whose run asks for its termination, and then does not come to a good end, is terminated all the same."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from celery_sidejob import RunningJob, Status, UnitNotCommittedError
from celery_sidejob.operations.runs import recovery
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct

pytestmark = pytest.mark.pooled_too


def raises(job: RunningJob) -> None:
    raise ZeroDivisionError


def retries(job: RunningJob) -> None:
    raise job.retry(countdown=3600)


def is_refused(job: RunningJob) -> None:
    """End with what the commit refuses."""
    job.enqueue(job.task, child_name="taken")
    job.enqueue(job.task, child_name="taken")


ENDS = [raises, retries, is_refused]


@pytest.mark.parametrize("ends", ENDS)
def test_it_survives_how_the_run_ends(stage: Stage, ends: Callable[[RunningJob], None]) -> None:
    def body(job: RunningJob) -> None:
        job.set(done=True)
        job.terminate()
        ends(job)

    job = stage.job(body)
    stage.drain()

    assert (job.refresh().status, job.state) == (Status.TERMINATED, {})
    assert stage.sidejob.dead.list() == []


def test_also_through_another_handle(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        stage.sidejob.get(job.id).terminate()
        raise ZeroDivisionError

    job = stage.job(body)
    stage.drain()
    assert job.refresh().status == Status.TERMINATED


def test_recursively_with_what_is_below_by_then(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.terminate(recursive=True)
        job.enqueue(stage.idle, child_name="never made")
        raise ZeroDivisionError

    job = stage.job(body)
    child = stage.sidejob.enqueue(stage.idle, parent=job, child_name="made")
    stage.drain()
    assert (job.refresh().status, child.refresh().status) == (Status.TERMINATED, Status.TERMINATED)
    assert list(job.children) == ["made"]


def test_what_is_asked_of_others_goes_with_the_unit(stage: Stage) -> None:
    """A unit that puts one child in the place of another would else leave none."""
    other = stage.job()

    def body(job: RunningJob) -> None:
        other.terminate()
        job.children["old"].terminate()
        raise ZeroDivisionError

    job = stage.job(body)
    child = stage.sidejob.enqueue(stage.idle, parent=job, child_name="old")
    stage.drain()
    assert (job.refresh().status, child.refresh().status) == (Status.FAILED, Status.COMPLETED)
    assert other.refresh().status == Status.COMPLETED


def test_it_is_asked_again_by_a_run_that_begins_again(stage: Stage) -> None:
    """A lost run is no end: the next one sees the packet that this one has read, and asks again."""

    def body(job: RunningJob) -> None:
        job.output("o").write(job.input("a").read())
        job.terminate()
        if job.run_no == 1:
            recovery.rescue(stage.runtime, job.id, run_no=1, worker_id=stage.worker_id, own=True, wait=True)

    job = stage.job(body)
    job.input("a").write(1)
    stage.drain()
    assert (job.refresh().status, list(job.output("o"))) == (Status.TERMINATED, [1])


@pytest.mark.parametrize("first", [True, False])
def test_in_a_block_it_has_the_fate_of_the_block(stage: Stage, first: bool) -> None:
    def body(job: RunningJob) -> None:
        if first:
            job.terminate()
        with psycopg.connect(direct(stage.database_url)) as connection:
            with job.unit(transaction=connection):
                job.set(in_block=True)
                if not first:
                    job.terminate()
            connection.rollback()

    job = stage.job(body)
    stage.drain()
    assert first or isinstance(stage.raised[job.id], UnitNotCommittedError)
    assert job.refresh().status == (Status.TERMINATED if first else Status.FAILED)


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("revives", [False, True])
def test_a_job_that_is_made_and_terminated_in_one_block_is_terminated(
    stage: Stage, recursive: bool, revives: bool
) -> None:
    """An ask adds nothing to the first run, which is owed already; a termination does, and a forced run after it."""

    def body(job: RunningJob) -> None:
        with psycopg.connect(direct(stage.database_url)) as connection:
            with job.unit(transaction=connection):
                child = job.enqueue(stage.idle, child_name="stillborn").terminate(recursive=recursive)
                child.run(force=revives)
            connection.commit()

    job = stage.inside(body)
    child = job.child("stillborn")
    assert child is not None
    assert child.status == Status.TERMINATING
    stage.drain()
    assert child.refresh().status == (Status.COMPLETED if revives else Status.TERMINATED)
