"""An app whose broker is its store, by the URL `sidejobpg://` alone."""

from __future__ import annotations

from celery import Celery

from celery_sidejob import SideJob
from tests.tools.recorder import Record

app = Celery("store", broker="sidejobpg://")
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=False,
    beat_schedule={"tick": {"task": "note", "schedule": 0.5, "args": ("tick",)}},
)
SideJob(app)


@app.task(name="note")
def note(event: str) -> None:
    """Note the event."""
    Record.from_env().note(event)


app.task(name="kept", durable=True)(note.run)
