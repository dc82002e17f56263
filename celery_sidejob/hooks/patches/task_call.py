"""Replaces `Backend.on_task_call` of an app's result backend; read in Celery 5.5.0 and 5.7.0.

`send_task` calls ``backend.on_task_call(producer, task_id)`` before it sends a message: Redis subscribes to the result
there, and fails the call after twenty seconds if it is away. Ours lets `sending` decide when that is asked for a
message that is kept. If a later Celery asks in another way, a call fails again when the backend is away, after it
waited, and nothing is kept of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .wrapping import wrap


def install(backend: Any, ask: Callable[..., Any]) -> None:
    """Have `ask` called with the backend, its own method, and what that takes; twice does no harm."""
    if "on_task_call" not in vars(backend):
        wrap(backend, "on_task_call", partial(ask, backend))
