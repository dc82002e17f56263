"""Fibonacci as a tree of jobs: naive, without any guard."""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import RunningJob, SideJob
from tests.tools.brokers import Broker
from tests.tools.recorder import Record

app = Celery("fibonacci")
app.conf.update(Broker.from_env().configuration)
app.conf.update(
    sidejob_database_url=os.environ["DATABASE_URL"],
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=False,
)
sidejob = SideJob(app)


@sidejob.task(name="fibonacci", outports=["result"])
def fibonacci(job: RunningJob, n: int) -> None:
    """Write the n-th Fibonacci number: for n above 1 the sum of what two children write."""
    if n < 2:
        job.output("result").write(n)
        Record.from_env().note("written", job=job.id, run_no=job.run_no)
        return
    children = job.children
    if not children:
        for back in (1, 2):
            job.enqueue(fibonacci, (n - back,), child_name=str(n - back))
        job.suspend()
    if any(child.status != "completed" for child in children.values()):
        job.suspend()
    job.output("result").write(sum(child.output("result").read() for child in children.values()))
    Record.from_env().note("written", job=job.id, run_no=job.run_no)
