"""A run in the process of a pool whose row its worker holds: it tells the worker when nothing but that row is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_QUIET: set[str] = set()
"""The task ids of runs that have just ended so in this process."""


def end(task_id: str) -> None:
    """Leave the end of a run to its worker: the body has ended well, that was told, and nothing follows it."""
    _QUIET.add(task_id)


def trace(by: Callable[..., Any], task: str, task_id: str, *args: Any, **options: Any) -> Sequence[Any]:
    """Run a task `by` Celery's tracer, and return what that does; one item more if its end is left to the worker.

    If the process dies before the worker has that, the run was lost, and is repeated.
    """
    outcome: Sequence[Any] = by(task, task_id, *args, **options)
    if task_id in _QUIET:
        _QUIET.discard(task_id)
        return (*outcome, True)
    return outcome
