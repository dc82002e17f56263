"""Doorbells that anybody who reaches the broker can send: a job's row says what runs, and when its asking expires."""

from __future__ import annotations

import pytest
from celery.app.task import Context
from celery.exceptions import Ignore
from kombu.message import Message

from celery_sidejob import Job
from celery_sidejob.hooks.jobs.job_request import JobRequest
from celery_sidejob.hooks.jobs.run import run_delivery
from celery_sidejob.hooks.messages.doorbell import HEADER
from celery_sidejob.model.durable import WORKER
from tests.tools.in_process import Stage


def delivered(stage: Stage, job: Job, task: str) -> None:
    """What a worker's process does with a doorbell for the job's next run that names this task."""
    headers = {"id": "forged", "task": task, HEADER: {"v": 1, "job": job.id, "for_run": 1}, WORKER: stage.worker_id}
    with pytest.raises(Ignore):
        run_delivery(stage.app.tasks[task], stage.runtime, Context(headers))


def known(stage: Stage) -> Job:
    """A job of a task that this process knows."""
    return stage.job()


def unknown(stage: Stage) -> Job:
    """A job of a task that it does not know."""
    job = stage.job()
    stage.sql("UPDATE jobs SET task = 'other.task' WHERE id = %s", job.id)
    return job


@pytest.mark.parametrize("job_of", [known, unknown])
def test_a_doorbell_that_names_another_task_runs_nothing(
    stage: Stage, job_of: object, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(stage)  # type: ignore[operator]
    before = stage.everything()

    delivered(stage, job, "stage.call")

    assert stage.everything() == before
    assert f"A message for job {job.id} is rejected: it names the task stage.call" in caplog.text


def test_a_doorbell_of_the_jobs_own_task_runs_it(stage: Stage) -> None:
    job = stage.job()
    task = stage.app.tasks[job.task]
    header = {"v": 1, "job": job.id, "for_run": 1}
    request = Context({"id": job.task_id, "task": job.task, HEADER: header, WORKER: stage.worker_id})
    run_delivery(task, stage.runtime, request)
    assert job.refresh().status == "completed"


def test_a_doorbell_does_not_say_when_an_asking_expires(stage: Stage) -> None:
    headers = {
        "id": "forged", "task": "stage.idle", "expires": "2020-01-01T00:00:00+00:00",
        HEADER: {"v": 1, "job": 1, "for_run": 1},
    }  # fmt: skip
    message = Message(b"[[], {}, {}]", content_type="application/json", content_encoding="utf-8", headers=headers)
    request = JobRequest(message, app=stage.app, task=stage.app.tasks["stage.idle"])
    assert not request.revoked()
