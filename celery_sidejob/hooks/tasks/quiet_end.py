"""The end of a run, of a task or of a job, whose process leaves to the worker what is to be done: nothing but that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from ...model.crash_points import reach

_TOLD: ContextVar[list[Any] | None] = ContextVar("celery_sidejob_told", default=None)
"""What the worker will be told of the run that is traced here: how it is named, once it is over."""


def end(run: tuple[Any, ...], point: str) -> bool:
    """Leave the end of a run to its worker: the body has ended well, that was told, and nothing follows it.

    False where no worker waits for it: in a test that runs a task by itself. `point`: the crash point before any end.
    """
    told = _TOLD.get()
    if told is None:
        return False
    reach(point)
    told.append(run)
    return True


def trace(by: Callable[..., Any], *args: Any, **options: Any) -> Sequence[Any]:
    """Run a task `by` Celery's tracer; return what that does, and the name of a run whose end was left to the worker.

    If the process dies before the worker has that, the run was lost.
    """
    told: list[Any] = []
    token = _TOLD.set(told)
    try:
        return (*by(*args, **options), *told)
    finally:
        _TOLD.reset(token)
