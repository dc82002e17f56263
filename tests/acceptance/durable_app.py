"""Ordinary tasks whose messages are kept, for workers that the tests of durable tasks start."""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import threading
import time
from typing import Any

from celery import Celery, group
from celery.exceptions import Ignore, Reject
from celery.signals import task_revoked

from celery_sidejob import (
    JobFailed,
    LeaseLostError,
    SideJob,
    heartbeat,
    stopping,
    task_buried,
    task_lost,
    task_recovered,
)
from celery_sidejob.hooks.tasks import results
from celery_sidejob.operations import stores
from tests.tools.brokers import Broker
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until


def hidden(value: Any) -> Any:
    """Hide a password; has a name, since processes that are spawned are sent the configuration."""
    return value.replace("hunter2", "[hidden]") if isinstance(value, str) else value


app = Celery("durable")
app.conf.update(
    **Broker.from_env().configuration,
    task_default_queue="durable",
    sidejob_durable_tasks=["named.*", "celery.chord_unlock"],
    sidejob_redact=hidden,
    accept_content=["json", "yaml"],
    worker_prefetch_multiplier=1,
    result_chord_retry_interval=0.2,
)
if "START_METHOD" in os.environ:
    app.conf.worker_pool_start_method = os.environ["START_METHOD"]
if "CANCEL" in os.environ:
    app.conf.worker_cancel_long_running_tasks_on_connection_loss = True
if "STORE_PAUSE_S" in os.environ:  # however long a process leaves a store alone, what comes then is the same
    stores.PAUSE_S = (0.5, float(os.environ["STORE_PAUSE_S"]))
if "CHORD_CLAIM_S" in os.environ:  # however long others wait for who has died with it
    results.CLAIM_S = int(os.environ["CHORD_CLAIM_S"])
    results.FRESH_S = results.CLAIM_S / 3
SideJob(app)
REPEATABLE = {"durable": True, "acks_late": True, "reject_on_worker_lost": True}


@task_buried.connect(weak=False)
def broken(**_: Any) -> None:
    """A receiver that fails, and is in nobody's way."""
    raise RuntimeError("the pager is down")


@task_buried.connect(weak=False)
def buried(task_id: str, reason: str, entry_id: int, **_: Any) -> None:
    """Write down of what the dead set was told."""
    Record.from_env().note("buried", id=task_id, reason=reason, entry=entry_id)


@task_lost.connect(weak=False)
def lost(task_id: str, **_: Any) -> None:
    """Write down what was lost with its worker."""
    Record.from_env().note("lost", id=task_id)


@task_recovered.connect(weak=False)
def recovered(task_id: str, **_: Any) -> None:
    """Write down what of that runs again, or has ended well after all."""
    Record.from_env().note("recovered", id=task_id)


@task_revoked.connect(weak=False)
def revoked(request: Any, **_: Any) -> None:
    """Write down of what Celery's receivers were told."""
    Record.from_env().note("revoked", id=request.id)


def note(task: Any, event: str = "ran", **data: Any) -> None:
    """Write down that a task did something."""
    Record.from_env().note(event, id=task.request.id, task=task.name, **data)


def held(task: Any, value: Any) -> Any:
    """Hold on until the test says go, and then return the value, or fail if it says so."""
    note(task, "holding", value=value)
    wait_until(lambda: Record.from_env().of("go", id=task.request.id), timeout=60)
    note(task, value=value)
    if value == "fail":
        raise ValueError("for good")
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


@app.task(bind=True, durable=True)
def held_and_retried(self: Any, countdown: float = 3600) -> None:
    """Wants to be retried when the test says go."""
    if not self.request.retries:
        held(self, None)
        raise self.retry(countdown=countdown)


@app.task(bind=True, durable=True, max_retries=None)
def beating(self: Any) -> Any:
    """Says of its lease and of its worker what it knows, before and after the test says go."""
    told: list[bool] = []
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(lambda: told.append(heartbeat(strict=True)),)
    )
    thread.start()
    thread.join()
    note(self, "beat", held=heartbeat(), in_a_thread=told, stopping=stopping())
    wait_until(lambda: stopping() or Record.from_env().of("go", id=self.request.id), timeout=60)
    try:
        heartbeat(strict=True)
    except LeaseLostError as error:
        note(self, "refused", error=str(error))
    note(self, held=heartbeat(), stopping=stopping())
    if stopping() and heartbeat():
        raise self.retry(countdown=0)
    return heartbeat()


@app.task(bind=True, durable=True)
def inline(self: Any) -> Any:
    """Has other durable tasks run inside its own run, then holds on."""
    values = [plus(1), plus.apply((2,)).result, plus.apply((3,), link=plus.s()).result]
    return held(self, [*values, heartbeat()])


@app.task(bind=True, durable=True)
def leaving(self: Any, how: str) -> None:
    """Leaves its process, in a way that is no ordinary error."""
    note(self)
    if how == "exit":
        sys.exit(3)
    raise OutOfTheOrdinary(how)


@app.task(bind=True, durable=True)
def out_of_stock(self: Any) -> None:
    """Fails, and names the group of its failure."""
    note(self)
    raise JobFailed("no stock", "Shelf 7 is empty.")


class OutOfTheOrdinary(BaseException):
    """Not an Exception."""


@app.task(
    bind=True, durable=True, autoretry_for=(ValueError,), max_retries=1, retry_backoff=False, default_retry_delay=0
)
def again(self: Any, fails: int) -> Any:
    """Is retried by Celery for its errors."""
    note(self, retries=self.request.retries, headers=self.request.headers)
    if self.request.retries < fails:
        raise ValueError("not yet")
    return self.request.retries


@app.task(bind=True, durable=True)
def telling(self: Any, secret: str) -> None:
    """Fails with what it was given."""
    note(self)
    raise ValueError(f"cannot use {secret}")


@app.task(bind=True)
def plain_failing(self: Any) -> None:
    """Not durable, and fails."""
    note(self)
    raise ValueError("for good")


@app.task(bind=True)
def calling(self: Any, value: Any) -> str:
    """Not durable, and calls a task that is."""
    note(self)
    return str(noted.delay(value).id)


@app.task(bind=True, durable=True)
def replaced_by_many(self: Any, *values: int) -> Any:
    """Goes on as a group."""
    note(self)
    raise self.replace(group(plus.s(value) for value in values))


@app.task(bind=True, durable=True)
def replaced_by_plain(self: Any, value: int) -> Any:
    """Goes on as a task that is not durable."""
    note(self)
    raise self.replace(plain.s(value))


@app.task(bind=True, **REPEATABLE)
def step(self: Any, value: Any) -> Any:
    """May be repeated, and says that it was."""
    note(self, value=value, again=bool(self.request.get("sidejob_republished")))
    return value


@app.task(bind=True, max_retries=1, default_retry_delay=0, **REPEATABLE)
def ending(self: Any, how: str) -> Any:
    """May be repeated, and ends otherwise than well."""
    note(self)
    if how == "ignore":
        raise Ignore()
    if how == "reject" and len(Record.from_env().of("ran", id=self.request.id)) == 1:
        raise Reject("not now", requeue=True)
    if how == "retry" and not self.request.retries:
        raise self.retry()
    if how == "fail":
        raise ValueError("for good")
    if how == "heartbeat":
        return [heartbeat(), heartbeat(strict=True)]
    return how


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


def uncounted(task: Any, value: Any, where: str) -> Any:
    """Dies in its first run when its result is stored, in the midst of a method of the backend's."""
    note(task)
    if len(Record.from_env().of("ran", id=task.request.id)) == 1:
        setattr(task.backend, where, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    return value


@app.task(bind=True, durable=True)
def uncounted_once(self: Any, value: Any, where: str) -> Any:
    """A part of a chord that must not be repeated."""
    return uncounted(self, value, where)


@app.task(bind=True, **REPEATABLE)
def uncounted_repeatable(self: Any, value: Any, where: str) -> Any:
    """A part of a chord that may be repeated."""
    return uncounted(self, value, where)


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
    note(self, event="errback", of=str(getattr(args[0], "id", args[0])) if args else None)


app.conf.beat_schedule = {"durable": {"task": f"{__name__}.noted", "schedule": 0.3, "args": ("beat",)}}
