"""A delivery of a job as Celery's own tracer runs it: what Celery is told of it, and what the store has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import states
from celery.app.trace import build_tracer

from celery_sidejob import Job, RunningJob, StoreUnavailableError
from celery_sidejob.hooks.messages.doorbell import HEADER
from celery_sidejob.model.durable import WORKER
from celery_sidejob.operations.runs import recovery
from celery_sidejob.store.outbox import doorbells
from tests.tools.in_process import Stage


def delivered(stage: Stage, job: Job) -> tuple[str, Any]:
    """Deliver a job's message to the stage's worker; returns the state that Celery gives it, and the value or error."""
    (due,) = doorbells.waiting(stage.runtime.connections, [job.id])
    task = stage.app.tasks[due.task]
    request = {
        "id": due.task_id, "task": due.task, "is_eager": False, "delivery_info": {}, WORKER: stage.worker_id,
        HEADER: {"v": 1, "job": job.id, "for_run": due.for_run},
    }  # fmt: skip
    returned = build_tracer(task.name, task, app=stage.app)(due.task_id, [], {}, request)
    if returned.info is None:
        return states.SUCCESS, returned.retval
    return returned.info.state, returned.info.retval


def test_what_celery_is_told_of_a_run_that_ends_well(stage: Stage) -> None:
    job = stage.job(lambda job: 7)
    assert delivered(stage, job) == (states.SUCCESS, 7)
    assert job.refresh().status == "completed"


@pytest.mark.parametrize("limit", [{"time_limit": 60}, {"soft_time_limit": 60, "time_limit": 90}, {}])
def test_an_error_of_a_task_with_a_time_limit_is_its_own(stage: Stage, limit: dict[str, float]) -> None:
    def limited(job: RunningJob) -> None:
        raise ValueError("its own")

    job = stage.task(limited, name="run.limited", **limit).enqueue()

    state, error = delivered(stage, job)

    assert (state, type(error), str(error)) == (states.FAILURE, ValueError, "its own")
    assert job.refresh().status == "failed"
    assert job.info["error"]["type"] == "ValueError"


@pytest.mark.parametrize("text", ["cannot parse \ud83d", "cannot parse \0"], ids=["a lone surrogate", "NUL"])
def test_an_error_whose_text_cannot_be_stored_ends_its_run(
    stage: Stage, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    def odd(job: RunningJob) -> None:
        error = ValueError(text)
        error.add_note(text)
        raise job.retry(exc=error, max_retries=1, countdown=0) from error

    caplog.set_level("CRITICAL", "celery.app.trace")  # pytest cannot report such texts
    job = stage.job(odd)

    assert [delivered(stage, job)[0] for _ in range(2)] == [states.RETRY, states.FAILURE]
    assert (job.refresh().status, job.info["losses"]) == ("failed", 0)
    assert job.info["error"]["message"].startswith("cannot parse ")
    assert stage.sql("SELECT reason FROM dead") == [("failed",)]


def test_an_end_that_the_store_refuses_becomes_one_that_it_takes(stage: Stage) -> None:
    stage.sql("ALTER TABLE dead ADD CONSTRAINT nothing_odd CHECK (error NOT LIKE '%%odd%%')")

    def odd(job: RunningJob) -> None:
        raise ValueError("odd")

    job = stage.job(odd)

    assert delivered(stage, job)[0] == states.FAILURE
    assert job.refresh().status == "failed"
    assert job.info["error"]["message"].startswith("The run ended with ValueError, and that cannot be stored")


def ended_elsewhere(stage: Stage, job: RunningJob) -> None:
    """The run is taken from its worker, which finds out at its next commit."""
    assert recovery.release(stage.runtime, job.id, run_no=job.run_no, worker_id=stage.worker_id)
    job.checkpoint()


def read_elsewhere(stage: Stage, job: RunningJob) -> None:
    """A packet that it has read is gone at its commit."""
    assert job.input("a").read() == 1
    stage.sql("DELETE FROM packets")


def store_away(stage: Stage, job: RunningJob) -> None:
    """A read finds no store."""
    raise StoreUnavailableError("The store is away.")


@pytest.mark.parametrize("why", [ended_elsewhere, read_elsewhere, store_away], ids=lambda why: why.__name__)
def test_a_run_that_does_not_count_is_nothing_for_celery_to_tell_of(
    stage: Stage, why: Callable[[Stage, RunningJob], None]
) -> None:
    job = stage.job(lambda job: why(stage, job))
    job.input("a").write(1)

    state, _ = delivered(stage, job)

    assert state == states.IGNORED
    assert job.refresh().status == "queued"


def test_a_job_that_came_late_to_a_terminated_parent_is_not_run(stage: Stage) -> None:
    ran: list[int] = []
    parent = stage.job()
    child = stage.job(lambda job: ran.append(job.id), parent=parent, child_name="late")
    parent.terminate()
    stage.run(parent)
    stage.sql("UPDATE jobs SET terminate_tree = true WHERE id = %s", parent.id)

    state, _ = delivered(stage, child)

    assert (state, ran) == (states.IGNORED, [])
    assert child.refresh().status == "terminating"


def test_a_body_is_shown_the_request_of_its_asking(stage: Stage) -> None:
    shown: dict[str, Any] = {}

    def looking(job: RunningJob) -> None:
        from celery import current_task

        request = current_task.request
        shown.update(
            id=request.id, called_directly=request.called_directly,
            callbacks=[one["task"] for one in request.callbacks], errbacks=[one["task"] for one in request.errbacks],
            chain=[one["task"] for one in request.chain],
            group=request.group, retries=request.retries, args=request.args,
        )  # fmt: skip

    signature = stage.app.signature
    job = stage.task(looking, name="run.looking").enqueue(
        link=signature("run.then"), link_error=signature("run.else"), chain=[dict(signature("run.next"))],
        group_id="all of them",
    )  # fmt: skip
    task_id = job.task_id

    assert delivered(stage, job)[0] == states.SUCCESS

    assert json.loads(json.dumps(shown)) == {
        "id": task_id, "called_directly": False, "callbacks": ["run.then"], "errbacks": ["run.else"],
        "chain": ["run.next"], "group": "all of them", "retries": 0, "args": [],
    }  # fmt: skip
