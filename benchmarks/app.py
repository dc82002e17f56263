"""What the benchmarks' workers run."""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import RunningJob, SideJob

app = Celery("benchmarks", broker=os.environ["BROKER_URL"])
app.conf.update(
    sidejob_database_url=os.environ["DATABASE_URL"], task_ignore_result=True, broker_connection_retry_on_startup=False
)
sidejob = SideJob(app)


@app.task(name="plain", shared=False)
def plain() -> None:
    """Do nothing, as a task."""


@sidejob.task(name="noop", queue="jobs")
def noop(job: RunningJob) -> None:
    """Do nothing, as a job."""


@sidejob.task(name="packets", queue="jobs", inports=["a"])
def packets(job: RunningJob, commit_every: int) -> None:
    """Read everything."""
    for _ in job.for_inputs("a", commit_every=commit_every):
        pass
