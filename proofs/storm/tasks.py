"""The app of a storm: ordinary durable tasks, each of which notes its beginning and its end."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
from typing import Any

from celery import Celery, signals

from celery_sidejob import SideJob
from proofs.trial.calls import AWAY
from tests.tools.recorder import Record

QUEUE = "storm"


faulthandler.register(signal.SIGUSR2, all_threads=True)
app = Celery("storm", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_BACKEND"])
app.conf.update(
    task_default_queue=QUEUE,
    worker_prefetch_multiplier=2,
    broker_heartbeat=5,
    redis_socket_timeout=5.0,
    redis_socket_connect_timeout=5.0,
)
if app.conf.broker_url.startswith("redis"):
    app.conf.broker_transport_options = {"socket_timeout": 5, "socket_connect_timeout": 5}
SideJob(app)

REPEATABLE = {"durable": True, "acks_late": True, "reject_on_worker_lost": True}
"""Never in the dead set: so many losses in a row as would take does nobody survive here."""


class Flaw(Exception):
    """Raised by bodies that are to fail."""


def begins(task: Any) -> None:
    """Note that a body begins, and take a while, mostly a short one."""
    run = getattr(task.request, "sidejob_run", None)
    generation = run.key[1] if run is not None else None
    Record.from_env().note("begins", id=task.request.id, task=task.name, generation=generation)
    time.sleep(random.choice((0.0, 0.0, 0.0, 0.0, 0.01, 0.05, 0.2, 1.0)))


def ends(task: Any) -> None:
    """Note that a body is about to end well."""
    Record.from_env().note("ends", id=task.request.id)


@app.task(bind=True, durable=True)
def once(self: Any, value: Any = None) -> Any:
    """Must not be repeated unseen."""
    begins(self)
    ends(self)
    return value


@app.task(bind=True, durable=True, acks_late=True)
def late(self: Any, value: Any = None) -> Any:
    """The same, acknowledged late."""
    begins(self)
    ends(self)
    return value


@app.task(bind=True, durable=True, ignore_result=True)
def unwatched(self: Any, value: Any = None) -> None:
    """The same, whose result nobody wants."""
    begins(self)
    ends(self)


@app.task(bind=True, **REPEATABLE)
def again(self: Any, value: Any = None) -> Any:
    """May be repeated."""
    begins(self)
    ends(self)
    return value


@app.task(bind=True, **REPEATABLE)
def total(self: Any, values: Any) -> Any:
    """The body of a chord."""
    begins(self)
    ends(self)
    return sum(values)


@app.task(bind=True, durable=True, max_retries=3, default_retry_delay=0)
def retrying(self: Any, times: int) -> int:
    """Is retried so often."""
    begins(self)
    if self.request.retries < times:
        raise self.retry(countdown=random.choice((0, 0.5, 4)))
    ends(self)
    return int(self.request.retries)


@app.task(bind=True, autoretry_for=(Flaw,), retry_backoff=False, default_retry_delay=0, max_retries=3, **REPEATABLE)
def stubborn(self: Any, times: int) -> int:
    """Is retried by itself."""
    begins(self)
    if self.request.retries < times:
        raise Flaw("not yet")
    ends(self)
    return int(self.request.retries)


@app.task(bind=True, durable=True)
def failing(self: Any, *args: Any) -> None:
    """Fails for good."""
    begins(self)
    raise Flaw("for good")


@app.task(bind=True, durable=True)
def told(self: Any, *args: Any) -> None:
    """An errback."""
    begins(self)
    ends(self)


@app.task(bind=True, durable=True)
def nesting(self: Any, value: Any) -> None:
    """Calls another, and notes that the call has returned, or that a server was away."""
    begins(self)
    try:
        called = again.delay(value)
    except AWAY as error:
        Record.from_env().note("unknown", form="from a task", error=f"{type(error).__name__}: {error}"[:200])
    else:
        Record.from_env().note("accepted", form="from a task", ids=[called.id])
    ends(self)


@app.task(bind=True, **REPEATABLE)
def replaced(self: Any, value: Any) -> Any:
    """Goes on as another task under its id."""
    begins(self)
    raise self.replace(again.s(value))


@app.task(bind=True, **REPEATABLE)
def ticked(self: Any) -> None:
    """Is sent by beat."""
    begins(self)
    ends(self)


app.conf.beat_schedule = {"tick": {"task": f"{__name__}.ticked", "schedule": 0.5}}


@signals.worker_process_init.connect
def _differ(**_: Any) -> None:
    """Have forked processes draw different numbers."""
    random.seed()
