"""Ordinary tasks whose messages are kept, for workers that the tests of durable tasks start."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_sidejob import SideJob
from tests.tools.brokers import Broker
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until

app = Celery("durable")
app.conf.update(
    **Broker.from_env().configuration,
    task_default_queue="durable",
    sidejob_durable_tasks=["named.*"],
    worker_prefetch_multiplier=1,
)
if "START_METHOD" in os.environ:
    app.conf.worker_pool_start_method = os.environ["START_METHOD"]
SideJob(app)
REPEATABLE = {"durable": True, "acks_late": True, "reject_on_worker_lost": True}


def note(task: Any, event: str = "ran", **data: Any) -> None:
    """Write down that a task did something."""
    Record.from_env().note(event, id=task.request.id, task=task.name, **data)


def held(task: Any, value: Any) -> Any:
    """Hold on until the test says go."""
    note(task, "holding", value=value)
    wait_until(lambda: Record.from_env().of("go", id=task.request.id), timeout=60)
    note(task, value=value)
    return value


@app.task(bind=True, durable=True)
def noted(self: Any, value: Any = None) -> Any:
    """Runs, and returns what it was given."""
    note(self, value=value, again=bool(self.request.get("sidejob_republished")))
    return value


@app.task(bind=True, durable=True)
def plus(self: Any, value: Any, more: Any = 1) -> Any:
    """Adds."""
    note(self, value=value)
    return (sum(value) if isinstance(value, list) else value) + more


@app.task(bind=True, durable=True, acks_late=True)
def noted_late(self: Any, value: Any = None) -> Any:
    """The same with a late acknowledgement."""
    note(self, value=value)
    return value


@app.task(bind=True, name="named.by_its_name")
def by_its_name(self: Any, value: Any = None) -> Any:
    """Durable by its name."""
    note(self, value=value)
    return value


@app.task(bind=True)
def plain(self: Any, value: Any = None) -> Any:
    """Not durable."""
    note(self, value=value)
    return value


@app.task(bind=True, durable=True)
def holder(self: Any, value: Any = None) -> Any:
    """Must not be repeated unseen."""
    return held(self, value)


@app.task(bind=True, **REPEATABLE)
def repeatable(self: Any, value: Any = None) -> Any:
    """May be repeated."""
    return held(self, value)


@app.task(bind=True, **REPEATABLE)
def step(self: Any, value: Any) -> Any:
    """May be repeated, and says that it was."""
    note(self, value=value)
    return value


@app.task(bind=True, **REPEATABLE)
def suicide(self: Any, times: int) -> Any:
    """Kills its process the first `times` times."""
    note(self)
    if len(Record.from_env().of("ran", id=self.request.id)) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@app.task(bind=True, **REPEATABLE)
def leaver(self: Any, times: int) -> Any:
    """Leaves the first `times` times."""
    note(self)
    if len(Record.from_env().of("ran", id=self.request.id)) <= times:
        sys.exit(3)
    return "stayed"


@app.task(bind=True, durable=True)
def leaver_once(self: Any) -> None:
    """Leaves, and must not be repeated unseen."""
    note(self)
    sys.exit(3)


@app.task(bind=True, durable=True)
def failing(self: Any) -> None:
    """Fails for good."""
    note(self)
    raise ValueError("for good")


@app.task(bind=True, durable=True, max_retries=2, default_retry_delay=0)
def retrying(self: Any, times: int) -> Any:
    """Is retried so many times, then succeeds."""
    note(self, retries=self.request.retries)
    if self.request.retries < times:
        raise self.retry(exc=ValueError("once more"))
    return self.request.retries


@app.task(bind=True, durable=True)
def patiently(self: Any) -> Any:
    """Is retried once, after a while."""
    note(self, retries=self.request.retries)
    if not self.request.retries:
        raise self.retry(countdown=4)
    return self.request.retries


@app.task(bind=True, durable=True, time_limit=1)
def slow(self: Any) -> None:
    """Is stopped by its hard limit."""
    note(self)
    time.sleep(60)


@app.task(bind=True, durable=True, soft_time_limit=0.5)
def softly(self: Any) -> None:
    """Is stopped by its soft limit."""
    note(self)
    time.sleep(60)


@app.task(bind=True, durable=True)
def ignoring(self: Any) -> None:
    """Wants nothing to be told."""
    note(self)
    raise Ignore()


@app.task(bind=True, durable=True, acks_late=True)
def rejecting(self: Any, requeue: bool) -> str:
    """Rejects its message, the first time with `requeue`."""
    note(self)
    if requeue and len(Record.from_env().of("ran", id=self.request.id)) > 1:
        return "taken"
    raise Reject("not now", requeue=requeue)


@app.task(bind=True, durable=True)
def replaced(self: Any, value: int) -> Any:
    """Goes on as another task."""
    note(self)
    raise self.replace(plus.s(value))


@app.task(bind=True, durable=True)
def nesting(self: Any, value: int) -> str:
    """Calls another durable task."""
    note(self)
    return str(noted.delay(value).id)


@app.task(bind=True, durable=True)
def errback(self: Any, *args: Any) -> None:
    """Is told of a failure."""
    note(self, event="errback")


app.conf.beat_schedule = {"durable": {"task": f"{__name__}.noted", "schedule": 0.3, "args": ("beat",)}}
