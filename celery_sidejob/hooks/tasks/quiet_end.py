"""The end of a run, of a task or a job, that its process leaves to the worker: at most a result is kept with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from ...model.crash_points import reach
from ...store.results import Ended

_TOLD: ContextVar[list[Any] | None] = ContextVar("celery_sidejob_told", default=None)
"""The facts for the worker about the run that is traced here: the run's name and its result, once it is over."""


def end(over: Ended, point: str) -> bool:
    """Leave the end of a run to its worker: the body has ended well, and nothing follows it but its result, if any.

    False if no worker waits for it, as in a test that runs a task by itself. `point`: the crash point before any end.
    """
    told = _TOLD.get()
    if told is None:
        return False
    reach(point)
    told.append(over)
    return True


def trace(by: Callable[..., Any], *args: Any, **options: Any) -> Sequence[Any]:
    """Run a task `by` Celery's tracer; return its result, and the name of a run whose end was left to the worker.

    If the process dies before the worker has this, the run is lost.
    """
    told: list[Any] = []
    token = _TOLD.set(told)
    try:
        return (*by(*args, **options), *told)
    finally:
        _TOLD.reset(token)
