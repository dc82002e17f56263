"""Tasks of each kind whose messages are rows of the broker that is their store."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

from celery_sidejob import SideJob
from tests.tools.recorder import Record

app = Celery("references", broker="sidejobpg://")
app.conf.update(
    task_ignore_result=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=False,
    sidejob_lost_after=600.0, sidejob_lease=6.0,
)  # fmt: skip
sidejob = SideJob(app)


def _note(event: str, hold: str | None) -> None:
    record = Record.from_env()
    record.note("began", name=event)
    while hold is not None and not os.path.exists(hold):
        time.sleep(0.01)
    record.note("ended", name=event)


@app.task(name="plain")
def plain(event: str, hold: str | None = None) -> None:
    """A task whose message is all there is."""
    _note(event, hold)


@app.task(name="once", durable=True)
def once(event: str, hold: str | None = None) -> None:
    """A durable task that locks its row before it begins."""
    _note(event, hold)


@app.task(name="repeatable", durable=True, on_lost="requeue")
def repeatable(event: str, hold: str | None = None) -> None:
    """A durable task whose row is held since the fetch of its message."""
    _note(event, hold)


@app.task(name="stubborn", durable=True, bind=True, max_retries=3)
def stubborn(self: Any, event: str) -> None:
    """A durable task that succeeds at its third try."""
    _note(f"{event} {self.request.retries}", None)
    if self.request.retries < 2:
        raise self.retry(countdown=0.3)


@sidejob.task(name="job")
def job(job: Any, event: str, hold: str | None = None) -> None:
    """A job."""
    _note(event, hold)
