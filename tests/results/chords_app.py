"""An app with SideJob whose results are in its store, with plain and durable tasks and jobs for chords."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from celery import Celery
from celery.exceptions import Reject

from celery_sidejob import RunningJob, SideJob
from tests.tools.recorder import Record

app = Celery("chords", broker=os.environ["BROKER_URL"], backend="sidejobpg://")
app.conf.update(
    sidejob_database_url=os.environ["DATABASE_URL"], broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1, **json.loads(os.environ.get("SETTINGS", "{}")),
)  # fmt: skip
sidejob = SideJob(app)


class OddError(Exception):
    """It can be neither pickled nor made again from its arguments."""

    def __init__(self, one: int, *, other: int) -> None:
        super().__init__(one, lambda: other)


def _odd(kind: str) -> Any:
    """Return something that is hard to keep, or raise it."""
    match kind:
        case "unpicklable":
            raise OddError(1, other=2)
        case "unknown":
            raise type("NowhereError", (Exception,), {"__module__": "nowhere.at.all"})("lost")
        case "text":
            raise ValueError("\0 and \ud800")
        case "large":
            return "x" * 1_000_000
    return {"nul": "\0", "lone": "\ud800", "nan": math.nan}[kind]


def _total(numbers: list[int]) -> int:
    Record.from_env().note("body", numbers=numbers)
    return sum(numbers)


@app.task(name="plain.part", acks_late=True, reject_on_worker_lost=True)
def plain_part(number: int) -> int:
    """Return the number."""
    return number


@app.task(name="durable.part", durable=True, on_lost="requeue", max_losses=5)
def durable_part(number: int) -> int:
    """Return the number."""
    return number


@app.task(name="durable.silent", durable=True, on_lost="requeue", ignore_result=True)
def silent_part(number: int) -> int:
    """Return the number, which only the chord gets."""
    return number


@sidejob.task(name="job.part")
def job_part(job: RunningJob, number: int) -> int:
    """Return the number."""
    return number


@app.task(name="durable.once", durable=True, on_lost="dead")
def once(number: int) -> int:
    """Return the number; it must not run twice."""
    return number


@app.task(name="fail", durable=True)
def fail(number: int) -> None:
    """Fail."""
    raise ValueError(f"number {number}")


@app.task(name="durable.limited", durable=True, on_lost="requeue", time_limit=2)
def limited() -> None:
    """Take too long."""
    Record.from_env().note("begun")
    Record.from_env().wait_for("end", timeout=120)


@app.task(name="durable.reject", durable=True)
def reject() -> None:
    """Give up."""
    raise Reject("in vain", requeue=False)


@app.task(name="plain.total", acks_late=True)
def plain_total(numbers: list[int]) -> int:
    """Note that it has run, and return the sum."""
    return _total(numbers)


@app.task(name="durable.total", durable=True, on_lost="requeue")
def durable_total(numbers: list[int]) -> int:
    """Note that it has run, and return the sum."""
    return _total(numbers)


@sidejob.task(name="job.total")
def job_total(job: RunningJob, numbers: list[int]) -> int:
    """Note that it has run, and return the sum."""
    return _total(numbers)


@app.task(name="errback", durable=True)
def errback(*args: Any) -> None:
    """Note that it was called."""
    Record.from_env().note("errback")


@app.task(name="plain.odd")
def plain_odd(kind: str) -> Any:
    """Return or raise something that is hard to keep."""
    return _odd(kind)


@app.task(name="durable.odd", durable=True)
def durable_odd(kind: str) -> Any:
    """Return or raise something that is hard to keep."""
    return _odd(kind)


@sidejob.task(name="job.odd")
def job_odd(job: RunningJob, kind: str) -> Any:
    """Return or raise something that is hard to keep."""
    return _odd(kind)


@app.task(name="durable.told", durable=True, bind=True)
def durable_told(task: Any) -> None:
    """Show a state of its own, and wait until the test has seen it."""
    task.update_state(state="PROGRESS", meta={"step": 1})
    Record.from_env().wait_for("seen")
