"""A delivery of a job in a managed queue: it may run another job than the job it names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery import Celery
from celery.app.task import Context

from ...services.heartbeat.deliveries import RunKey
from ..worker import own_process, pool_process


def like(task: Any, request: Context) -> Sequence[str]:
    """Return the sidejob tasks whose runs this delivery may begin: they have the time limits and lease of its task.

    Celery has set the limits before the run was chosen. A delivery with its own limits is only for the job that it
    names.
    """
    if any(request.timelimit or ()):
        return ()
    limits = _limits(task)
    return [
        name for name, other in task.app.tasks.items() if getattr(other, "sidejob", False) and _limits(other) == limits
    ]


@contextmanager
def turned(app: Celery, named: RunKey, run: RunKey) -> Iterator[None]:
    """Within the block the delivery of one run executes another; the worker's parent learns of it."""
    if run == named:
        yield
        return
    runs = own_process.runs_beside(app)
    if runs is not None:  # a thread, or a greenlet
        runs.turned(named, run)
        yield
        return
    pool_process.write_run(os.getpid(), run)
    try:
        yield
    finally:
        pool_process.write_run(os.getpid(), None)


def _limits(task: Any) -> tuple[Any, ...]:
    return task.time_limit, task.soft_time_limit, task.lease
