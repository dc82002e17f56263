"""A task whose body is an `async def`, for Celery's tracer: it calls the body as any other."""

from __future__ import annotations

from functools import wraps
from typing import Any

from celery.app.task import Task

from . import coroutines


def is_asynchronous(task: Task) -> bool:
    """Tell whether the task's body is an `async def`."""
    return coroutines.is_coroutine_function(_body_of(task))


def let_run(task: Task) -> None:
    """Let a call of the task by Celery run its `async def` to the end; a second call has no effect.

    A call of your own, `await add(2, 3)`, still gets the coroutine. The body lies inside of what Celery wraps around it
    for `autoretry_for`, which is to see its errors.
    """
    body = _body_of(task)
    if hasattr(body, "runs_coroutine") or not coroutines.is_coroutine_function(body):
        return

    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        coroutine = body(*args, **kwargs)
        return coroutine if task.request.called_directly else coroutines.run(coroutine)

    run.runs_coroutine = True  # type: ignore[attr-defined]
    setattr(task, "_orig_run" if hasattr(task, "_orig_run") else "run", run)


def _body_of(task: Task) -> Any:
    return getattr(task, "_orig_run", task.run)  # without the wrapper of autoretry_for
