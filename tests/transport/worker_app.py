"""A plain Celery app on the broker it is given, with the transport and nothing else of this package."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from celery import Celery
from celery.exceptions import Reject
from celery.worker.control import control_command

import celery_sidejob.transport  # noqa: F401  # makes sidejob:// known
from tests.tools.recorder import Record

app = Celery("worker", broker=os.environ["BROKER_URL"])
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,
    worker_cancel_long_running_tasks_on_connection_loss=bool(os.environ.get("CANCEL")),
    broker_connection_retry_on_startup=False,
    broker_transport_options={
        "consumer_timeout": float(os.environ.get("CONSUMER_TIMEOUT", "3.5")),
        "loop_timeout": float(os.environ.get("LOOP_TIMEOUT", "30")),
    },
)
app.conf.update(json.loads(os.environ.get("SETTINGS", "{}")))


@control_command()
def stand_still(state: Any) -> None:
    """Keep the worker's main loop from going on."""
    Record.from_env().note("still")
    Record.from_env().wait_for("move", timeout=60)


@app.task(name="note")
def note(event: str) -> None:
    """Note the event."""
    Record.from_env().note(event)


app.task(name="limited", rate_limit="1/h")(note.run)


@app.task(name="last", bind=True)
def last(task: Any, seconds: float) -> None:
    """Note when it begins, and when it has lasted so long."""
    Record.from_env().note("begun", delivery_count=task.request.properties.get("delivery_count"))
    time.sleep(seconds)
    Record.from_env().note("ended")


@app.task(name="rejected", bind=True)
def rejected(task: Any) -> None:
    """Give itself back once."""
    Record.from_env().note("rejected")
    if not task.request.delivery_info["redelivered"]:
        raise Reject("not now", requeue=True)


@app.task(name="early", acks_late=False)
def early(seconds: float) -> None:
    """As `last`, and acknowledged when it begins."""
    Record.from_env().note("early")
    time.sleep(seconds)


@app.task(name="kill", reject_on_worker_lost=True)
def kill() -> None:
    """Note when it begins, and kill the process that it is in."""
    Record.from_env().note("kill")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="leave")
def leave() -> None:
    """Note when it begins, and have its worker leave."""
    Record.from_env().note("leave")
    raise SystemExit


@app.task(name="compute")
def compute(seconds: float) -> None:
    """As `last`, and never wait: a greenlet that computes lets no other run."""
    Record.from_env().note("begun")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass
    Record.from_env().note("ended")


@app.task(name="hold")
def hold() -> None:
    """Note when it begins, and when it was let go."""
    Record.from_env().note("begun")
    Record.from_env().wait_for("go", timeout=60)
    Record.from_env().note("ended")


app.task(name="hold_early", acks_late=False)(hold.run)
