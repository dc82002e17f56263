"""A durable task and a sidejob task, for workers that are sent messages which nobody could mean."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_sidejob import RunningJob, SideJob
from tests.tools.brokers import Broker
from tests.tools.recorder import Record

app = Celery("malformed")
app.conf.update(
    **Broker.from_env().configuration, task_default_queue="malformed",
    worker_prefetch_multiplier=int(os.environ.get("PREFETCH", "4")),
)  # fmt: skip
sidejob = SideJob(app)


@app.task(bind=True, durable=True)
def noted(self: Any, value: Any = None) -> Any:
    """Write down that it ran."""
    Record.from_env().note("ran", id=self.request.id, value=value)
    return value


@app.task(bind=True, durable=True, acks_late=True)
def noted_late(self: Any) -> None:
    """Nobody calls it as it should be called."""


@sidejob.task
def job(job: RunningJob, value: Any = None) -> Any:
    """Write down that it ran."""
    Record.from_env().note("ran", id=job.task_id, value=value)
    return value
