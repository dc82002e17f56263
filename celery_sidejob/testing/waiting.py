"""Waiting for a fact, never for time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def patient(timeout: float) -> float:
    """Return a deadline in seconds, multiplied by `SIDEJOB_TEST_PATIENCE` on a busy machine."""
    return timeout * float(os.environ.get("SIDEJOB_TEST_PATIENCE", "1"))


def wait_until(
    predicate: Callable[[], T | None], *, timeout: float = 10.0, interval: float = 0.02, message: str = ""
) -> T:
    """Return the first truthy value of `predicate`; after `timeout` seconds TimeoutError shows its last value.

    The environment variable `SIDEJOB_TEST_PATIENCE` multiplies all timeouts, for a busy machine.
    An exception of the predicate counts as "not yet". If the last call raised it, it is the TimeoutError's cause. The
    predicate is called at least once, and once more after the deadline, so that a busy machine fails no test.
    """
    timeout = patient(timeout)
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        failure: Exception | None = None
        value: T | None = None
        try:
            value = predicate()
        except Exception as error:
            failure = error
        if value:
            return value
        if late:
            last = f"raised {failure!r}" if failure else f"returned {value!r}"
            waited_for = message or getattr(predicate, "__qualname__", repr(predicate))
            raise TimeoutError(f"not within {timeout:g} s: {waited_for} (last {last})") from failure
        time.sleep(interval)
