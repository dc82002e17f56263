"""A durable task and a sidejob task, for workers that are sent messages which nobody could mean."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, signals

from celery_sidejob import RunningJob, SideJob
from tests.tools.brokers import Broker
from tests.tools.recorder import Record

NO_MEMORY = "no memory"
"""The argument of a body that raises MemoryError."""

app = Celery("malformed")
app.conf.update(
    **Broker.from_env().configuration, task_default_queue="malformed",
    worker_prefetch_multiplier=int(os.environ.get("PREFETCH", "4")),
)  # fmt: skip
sidejob = SideJob(app)


@app.task(bind=True, durable=True)
def noted(self: Any, value: Any = None) -> Any:
    """Write down that it ran."""
    return ran(self.request.id, value)


@app.task(bind=True, durable=True, acks_late=True)
def noted_late(self: Any) -> None:
    """Nobody calls it as it should be called."""


@sidejob.task
def job(job: RunningJob, value: Any = None) -> Any:
    """Write down that it ran."""
    return ran(job.task_id, value)


@app.task(bind=True)
def plain(self: Any, value: Any = None) -> Any:
    """Write down that it ran: Celery alone runs it."""
    return ran(self.request.id, value)


def ran(task_id: Any, value: Any) -> Any:
    """Write it down, or have no memory for that."""
    if value == NO_MEMORY:
        raise MemoryError
    Record.from_env().note("ran", id=task_id, value=value)
    return value


@signals.worker_ready.connect
def lose_places(sender: Any = None, **_: Any) -> None:
    """Take all places of the pool for nothing, if a test wants to see that: by a mistake that nobody knows yet."""
    if "LOSES_PLACES" in os.environ:
        while sender.controller.semaphore.acquire(lambda: None):
            pass
