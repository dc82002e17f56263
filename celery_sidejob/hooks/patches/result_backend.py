"""Replaces methods of an app's result backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .wrapping import wrap


def ask_by(backend: Any, ask: Callable[..., Any]) -> None:
    """Have `ask` called with the backend, its own method, and what that takes; twice does no harm.

    Replaces `Backend.on_task_call` of an app's result backend; read in Celery 5.5.0 and 5.7.0.

    `send_task` calls ``backend.on_task_call(producer, task_id)`` before it sends a message: Redis subscribes to the
    result there, and fails the call after twenty seconds if it is away. Ours lets `sending` decide when that is asked
    for a message that is kept. If a later Celery asks in another way, a call fails again when the backend is away,
    after it waited, and nothing is kept of it.
    """
    if "on_task_call" not in vars(backend):
        wrap(backend, "on_task_call", partial(ask, backend))


def tell_by(backend: Any, **by: Callable[..., Any]) -> None:
    """Have calls of these methods go to `by`; twice does no harm.

    Replaces the methods of an app's result backend by which Celery's tracer tells what became of a task.

    Read in Celery 5.5.0 and 5.7.0. The tracer calls `store_result` with STARTED before the body, and afterwards
    `mark_as_done`, `mark_as_failure` or `mark_as_retry`, all with the task's request. It takes an error of theirs for
    the task's failure, tells the backend of that failure too, and sends `task_postrun` without an outcome. If a later
    Celery calls other methods, a durable task whose backend was away is in the dead set as failed, though it ended well
    (`hooks/tasks/telling.py`).

    A backend calls and sends all errbacks of a failure by one call of its `_call_task_errbacks(request, exc,
    traceback)`, which raises if one of them cannot be sent. If a later one does not, each such one has the others told
    again.

    `celery.chord_unlock` calls `chord_error_from_stack` of the app's backend, from within the error's handler, when it
    can not read the parts of its chord. If a later one does not, a chord fails whose backend was away for a moment.
    """
    for name, told in by.items():
        if name not in vars(backend):
            wrap(backend, name, told)
