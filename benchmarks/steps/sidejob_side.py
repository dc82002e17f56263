"""This package as a side: `python -m benchmarks.steps.sidejob_side install|client URL`, and an app for a worker."""

from __future__ import annotations

import os
import sys

from celery import Celery

from benchmarks.note import note
from benchmarks.steps.body import QUEUE, nothing, obey
from celery_sidejob import Job, RunningJob, SideJob
from celery_sidejob.store.schema.migrate import upgrade

app = Celery("steps", broker="sidejobpg://", set_as_current=False)
app.conf.update(task_ignore_result=True, task_default_queue=QUEUE)
app.conf.sidejob_database_url = os.environ.get("DATABASE_URL") or sys.argv[-1]
sidejob = SideJob(app)
resting: list[Job] = []


@sidejob.task(name="steps", inports=["go"])
def body(job: RunningJob, steps: int, rests: bool) -> None:
    """Do so many steps, rest if told so, and note the end."""
    for _ in range(steps):
        job.step("step", nothing)
    if rests:
        note()
        job.receive("go")
    note()


def make(count: int, steps: int, rests: bool) -> None:
    """Make jobs."""
    made = sidejob.enqueue_many([{"task": "steps", "args": (steps, rests)}] * count)
    resting.extend(made if rests else ())


def wake() -> None:
    """Write what each job waits for."""
    for job in resting:
        job.input("go").write(1)
    resting.clear()


if __name__ == "__main__":
    if sys.argv[1] == "install":
        upgrade(sys.argv[2])
    else:
        obey(make, wake)
