"""Failures by their group: what a body names, or else the class of its exception; listed, counted and retried by it."""

from __future__ import annotations

import pickle

import pytest

from celery_sidejob import InvalidValueError, Job, JobFailed, RunningJob
from tests.tools.commands import ask
from tests.tools.in_process import Stage


def no_stock(job: RunningJob) -> None:
    raise JobFailed("no stock", "Shelf 7 is empty.")


def broken(job: RunningJob) -> None:
    raise ValueError("broken")


def fail(stage: Stage, body: object, number: int = 1, **options: object) -> list[Job]:
    """Jobs that have failed by this body, in this order."""
    jobs = [stage.job(body, **options) for _ in range(number)]  # type: ignore[arg-type]
    for job in jobs:
        with pytest.raises((JobFailed, ValueError)):
            stage.run(job)
    return jobs


def test_a_body_names_the_group_of_its_failure(stage: Stage) -> None:
    (job,) = fail(stage, no_stock)
    fail(stage, broken)

    assert stage.sidejob.dead.groups() == {"no stock": 1, "ValueError": 1}
    (entry,) = stage.sidejob.dead.list(group="no stock")
    assert (entry.job_id, entry.group, entry.error) == (job.id, "no stock", "JobFailed: Shelf 7 is empty.")


def test_the_result_of_a_job_that_named_its_group_has_it_too(stage: Stage) -> None:
    stage.app.conf.result_backend = "cache+memory://"
    (job,) = fail(stage, no_stock)

    error = job.result.result

    assert isinstance(error, JobFailed)
    assert (error.group, error.message) == ("no stock", "Shelf 7 is empty.")


def test_the_newest_of_a_group_come_first_in_pages(stage: Stage) -> None:
    first, second, third = fail(stage, no_stock, 3)
    fail(stage, broken)
    dead = stage.sidejob.dead

    page = dead.list(group="no stock", limit=2)
    rest = dead.list(group="no stock", limit=2, after=page[-1].id)

    assert [[entry.job_id for entry in entries] for entries in (page, rest)] == [[third.id, second.id], [first.id]]
    assert dead.list(group="no stock", after=rest[-1].id) == []


def test_a_group_is_also_listed_by_task_and_by_queue(stage: Stage) -> None:
    (here,) = fail(stage, no_stock, queue="here")
    fail(stage, no_stock, queue="there")
    dead = stage.sidejob.dead

    assert [entry.job_id for entry in dead.list(group="no stock", queue="here")] == [here.id]
    assert len(dead.list(group="no stock", task="stage.call")) == 2
    assert dead.list(group="no stock", task="other") == dead.list(group="none") == []
    assert dead.tasks() == ["stage.call"]


def test_a_group_is_retried_in_the_order_of_its_failures(stage: Stage) -> None:
    first, second, third = fail(stage, no_stock, 3)
    (other,) = fail(stage, broken)

    assert stage.sidejob.dead.retry_all(group="no stock", limit=2) == 2

    assert [str(job.refresh().status) for job in (first, second, third, other)] == [
        "queued", "queued", "failed", "failed"
    ]  # fmt: skip


def test_what_failed_in_a_queue_is_retried(stage: Stage) -> None:
    (here,) = fail(stage, no_stock, queue="here")
    (there,) = fail(stage, no_stock, queue="there")

    assert ask(stage.app, "dead", "retry", "--queue", "there", "--yes").lines == ["1 entry retried."]

    assert [str(job.refresh().status) for job in (here, there)] == ["failed", "queued"]


def test_a_failure_that_is_tried_again_first_is_in_no_group(stage: Stage) -> None:
    def again(job: RunningJob) -> None:
        raise job.retry(exc=JobFailed("no stock", "none"), countdown=0)

    job = stage.job(again)
    stage.claim(job)
    stage.perform(stage.holds[job.id])

    assert (str(job.refresh().status), len(stage.sidejob.dead)) == ("queued", 0)


@pytest.mark.parametrize("group", ["", "x" * 256, "a\0b", "\ud800", 5, None])
def test_a_group_that_cannot_be_kept_is_refused(group: object) -> None:
    with pytest.raises(InvalidValueError, match="cannot be a group"):
        JobFailed(group, "message")  # type: ignore[arg-type]


def test_a_failure_goes_through_pickle_with_its_group() -> None:
    error = pickle.loads(pickle.dumps(JobFailed("no stock", "Shelf 7 is empty.")))

    assert (error.group, str(error)) == ("no stock", "Shelf 7 is empty.")
    assert str(JobFailed("no stock")) == "no stock"
