"""A Celery app with nothing of ours in it, for the tests of the tools."""

from __future__ import annotations

import os
import time

from celery import Celery

from tests.tools.recorder import Record

app = Celery("plain", broker=os.environ["BROKER_URL"])
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=False,
    beat_schedule={"tick": {"task": "plain.note", "schedule": 0.2, "args": ("tick",)}},
)


@app.task(name="plain.note")
def note(event: str) -> None:
    """Note the event."""
    Record.from_env().note(event)


@app.task(name="plain.hang")
def hang() -> None:
    """Note that it has begun, then never end."""
    Record.from_env().note("hanging")
    while True:
        time.sleep(60)
