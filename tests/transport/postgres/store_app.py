"""An app whose broker is its store, by the URL `sidejobpg://` alone."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_sidejob import RunningJob, SideJob
from tests.tools.recorder import Record

app = Celery("store", broker="sidejobpg://")
app.conf.update(
    task_ignore_result=True,
    task_inherit_parent_priority=True,
    broker_connection_retry_on_startup=False,
    beat_schedule={"tick": {"task": "note", "schedule": 0.5, "args": ("tick",)}},
)
sidejob = SideJob(app)


@app.task(name="note")
def note(event: str) -> None:
    """Note the event."""
    Record.from_env().note(event)


app.task(name="kept", durable=True)(note.run)


def _tell(request: Any, event: str) -> None:
    Record.from_env().note(event, priority=request.delivery_info["priority"], eta=request.eta)


@app.task(name="told", bind=True)
def told(task: Any, event: str) -> None:
    """Note what the request says of its priority and time, and have a child do so."""
    _tell(task.request, event)
    if not event.startswith("child"):
        app.send_task("told", (f"child of {event}",))


@app.task(name="kept_told", bind=True, durable=True)
def kept_told(task: Any, event: str) -> None:
    """Do the same as a durable task."""
    _tell(task.request, event)
    app.send_task("told", (f"child of {event}",))


@sidejob.task(name="job_told")
def job_told(job: RunningJob, event: str) -> None:
    """Do the same as a job."""
    _tell(job.request, event)
    app.send_task("told", (f"child of {event}",))
