"""The app of the spawn test: all at the top of a module, as projects have it."""

from __future__ import annotations

import os

import billiard
from celery import Celery

from celery_sidejob import RunningJob, SideJob, sidejob_task
from tests.tools.recorder import Record

app = Celery("spawned", broker=os.environ["BROKER_URL"], include=["tests.hooks.jobs.spawned"])
app.conf.update(worker_pool_start_method="spawn", worker_prefetch_multiplier=1)
sidejob = SideJob(app)


@sidejob.task(name="spawned.work", inports=["a"], outports=["b"])
def work(job: RunningJob) -> None:
    for value in job.for_inputs("a"):
        job.output("b").write(value + 1)
    Record.from_env().note("worked", job=job.id, method=billiard.get_start_method(), stopping=job.stopping)


@sidejob_task(name="spawned.shared", inports=["a"])
def shared(job: RunningJob) -> None:
    job.enqueue(work, child_name="child")


@app.task(name="spawned.plain")
def plain() -> None:
    Record.from_env().note("plain", method=billiard.get_start_method())
    work.delay()
