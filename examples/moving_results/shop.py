"""A shop on its way from one result backend to another, as `docs/moving_results.md` describes it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from celery import Celery
from celery.app.backends import by_url
from celery.result import AsyncResult

from celery_sidejob import RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///shop").partition("://")[2]
QUEUES = os.environ.get("SHOP_QUEUES", "")  # a prefix of the names of all queues
OTHER = os.environ.get("SHOP_OTHER_RESULTS")  # the result backend of the other processes

app = Celery("shop", broker="sidejobpg://", backend="redis://localhost:6379/1")
app.conf.task_default_queue = f"{QUEUES}celery"
app.conf.task_routes = {"shop.mails.*": {"queue": f"{QUEUES}mails"}}
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)


def result_of(task_id: str) -> AsyncResult:
    """Return the result of a task, whichever kind of process has called it."""
    result = app.AsyncResult(task_id)
    if OTHER is None or result.state != "PENDING":
        return result
    return app.AsyncResult(task_id, backend=other_backend())


@cache
def other_backend() -> Any:
    """Make the backend of the other processes, once."""
    backend, url = by_url(OTHER, app.loader)
    return backend(app=app, url=url)


@app.task
def quote(prices: list[int]) -> int:
    """Add up prices: a plain task."""
    return sum(prices)


@app.task(durable=True, on_lost="requeue")
def confirm(order: int) -> str:
    """Confirm an order: a durable task."""
    return f"order {order} is confirmed"


@sidejob.task(inports=["payments"])
def deliver(job: RunningJob, order: int) -> str:
    """Wait for the payment of an order: a job, which rests meanwhile."""
    return f"order {order} is paid with {job.receive('payments')}"
