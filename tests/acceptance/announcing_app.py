"""Jobs that move, read, write and fail, and one that keeps the log of it."""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import RunningJob, SideJob
from tests.tools.brokers import Broker

app = Celery("stage")
app.conf.update(Broker.from_env().configuration)
app.conf.update(
    sidejob_database_url=os.environ["DATABASE_URL"], task_ignore_result=True, worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)  # fmt: skip
sidejob = SideJob(app)


@sidejob.task(name="announcing.idle")
def idle(job: RunningJob) -> None:
    """Do nothing."""


@sidejob.task(name="announcing.add", inports=["a"], outports=["sum"])
def add(job: RunningJob) -> None:
    """Write the sum so far of what comes."""
    for value in job.for_inputs("a"):
        job.set(total=job.get("total", 0) + value)
        job.output("sum").write(job.get("total"))


@sidejob.task(name="announcing.fail")
def fail(job: RunningJob) -> None:
    """Raise."""
    raise ValueError("no")


@sidejob.task(name="announcing.collect", inports={"entries": {"channels": ["/sidejob/log"]}})
def collect(job: RunningJob) -> None:
    """Keep the log in the state."""
    for entry in job.for_inputs("entries"):
        job.set(entries=[*job.get("entries", []), entry])
