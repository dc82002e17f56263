"""Waiting for a fact, never for time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T | None],
    *,
    timeout: float = 10.0,
    interval: float = 0.02,
    message: str = "",
) -> T:
    """Return the first truthy value of `predicate`, or raise TimeoutError with what it said last.

    An exception of the predicate counts as "not yet" and is the cause of the TimeoutError if it was the last word.
    The predicate is asked at least once, and once more after the deadline, so that a test that was not given the
    processor for a while does not fail for it.
    """
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
