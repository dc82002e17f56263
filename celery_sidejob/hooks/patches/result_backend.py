"""Replaces methods of an app's result backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .wrapping import wrap


def ask_by(backend: Any, ask: Callable[..., Any]) -> None:
    """Call `ask` with the backend, its own method, and that method's arguments; a second call has no effect.

    Replaces `Backend.on_task_call` of an app's result backend; read in Celery 5.5.0 and 5.7.0.

    `send_task` calls ``backend.on_task_call(producer, task_id)`` before it sends a message: Redis subscribes to the
    result there, and fails the call after twenty seconds if it is unreachable. Ours lets `sending` decide when the
    backend is asked for a kept message. If a later Celery asks in another way, a call fails again if the backend is
    unreachable, after a wait, and its message is not kept.
    """
    if "on_task_call" not in vars(backend):
        wrap(backend, "on_task_call", partial(ask, backend))


def tell_by(backend: Any, **by: Callable[..., Any]) -> None:
    """Redirect calls of these methods to `by`; a second call has no effect.

    Replaces the methods of an app's result backend by which Celery's tracer reports a task's outcome.

    Read in Celery 5.5.0 and 5.7.0. The tracer calls `store_result` with STARTED before the body, and afterwards
    `mark_as_done`, `mark_as_failure` or `mark_as_retry`, all with the task's request. It treats an error of theirs as
    the task's failure, reports that failure to the backend too, and sends `task_postrun` without an outcome. If a later
    Celery calls other methods, a durable task whose backend was unreachable is in the dead set as failed, though it
    ended well (`hooks/tasks/telling.py`).

    A backend calls and sends all errbacks of a failure by one call of its `_call_task_errbacks(request, exc,
    traceback)`, which raises if an errback cannot be sent. If a later Celery does not, each such errback makes the
    others run again.

    `celery.chord_unlock` calls `chord_error_from_stack` of the app's backend, from within the error's handler, when it
    cannot read the parts of its chord. If a later Celery does not, a chord fails if its backend is unreachable for a
    moment.
    """
    for name, told in by.items():
        if name not in vars(backend):
            wrap(backend, name, told)
