"""A plain Celery app with Postgres as broker and as result backend: one server, and nothing else of this package."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

import celery_sidejob.transport  # noqa: F401  # makes sidejobpg:// known
from tests.tools.recorder import Record

app = Celery("canvas", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_BACKEND"])
app.conf.update(broker_connection_retry_on_startup=False, result_chord_retry_interval=0.1)


@app.task(name="add")
def add(one: int, other: int) -> int:
    """Return the sum."""
    return one + other


@app.task(name="total")
def total(numbers: list[int]) -> int:
    """Return the sum of all."""
    return sum(numbers)


@app.task(name="again", bind=True, max_retries=3)
def again(task: Any, countdown: float) -> int:
    """Fail twice, and return how often it was tried."""
    Record.from_env().note("tried", eta=task.request.eta)
    if task.request.retries < 2:
        raise task.retry(countdown=countdown)
    return int(task.request.retries)


@app.task(name="note", bind=True)
def note(task: Any, event: str) -> str:
    """Note the event, and what the request says of its time."""
    request = task.request
    Record.from_env().note(event, eta=request.eta)
    return event


@app.task(name="fail")
def fail() -> None:
    """Raise."""
    raise ValueError("on purpose")
