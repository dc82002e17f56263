"""A plain Celery app with broker and results in Postgres, and nothing else of this package."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery

import celery_sidejob.transport  # noqa: F401  # makes sidejobpg:// known
from tests.tools.recorder import Record

app = Celery("results", broker=os.environ["BROKER_URL"], backend=os.environ["BROKER_URL"])
app.conf.update(broker_connection_retry_on_startup=False, result_chord_retry_interval=0.1)
app.conf.update(json.loads(os.environ.get("SETTINGS", "{}")))


class OddError(Exception):
    """It can be neither pickled nor made again from its arguments."""

    def __init__(self, one: int, *, other: int) -> None:
        super().__init__(one, lambda: other)


@app.task(name="add")
def add(one: int, other: int) -> int:
    """Return the sum."""
    return one + other


@app.task(name="total")
def total(numbers: list[int]) -> int:
    """Return the sum of all."""
    return sum(numbers)


@app.task(name="echo")
def echo(value: Any) -> Any:
    """Return the argument."""
    return value


@app.task(name="odd")
def odd(kind: str) -> Any:
    """Return something that is hard to keep, or raise it."""
    if kind == "error":
        raise OddError(1, other=2)
    if kind == "text":
        raise ValueError("\0 and \ud800")
    return {"nul": "\0", "lone": "\ud800", "nan": float("nan")}


@app.task(name="large")
def large(size: int) -> str:
    """Return a text of so many characters."""
    return "x" * size


@app.task(name="told", bind=True)
def told(task: Any, steps: int) -> int:
    """Tell of each step; each waits until the test has seen the one before."""
    record = Record.from_env()
    for step in range(steps):
        task.update_state(state="PROGRESS", meta={"step": step})
        record.wait_for(f"seen {step}")
    return steps


@app.task(name="parent", trail=True)
def parent(count: int) -> int:
    """Call some tasks, which are its children."""
    return len([add.delay(number, number) for number in range(count)])


@app.task(name="held")
def held(name: str) -> str:
    """Note that it has begun, and end when the test says so."""
    record = Record.from_env()
    record.note(f"begun {name}")
    record.wait_for(f"end {name}", timeout=120)
    return name


@app.task(name="slow")
def slow(seconds: float) -> float:
    """Take a while."""
    time.sleep(seconds)
    return seconds
