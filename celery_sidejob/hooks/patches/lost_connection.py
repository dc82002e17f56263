"""Replaces `Consumer.on_connection_error_after_connected` of one worker's consumer; read in Celery 5.5.0 and 5.7.0.

With `worker_cancel_long_running_tasks_on_connection_loss` it cancels what runs by `Request.cancel`, as a cold stop
does. Where bodies run in the worker's own process, a cold stop ends that. Ours notes which of the two it is. If a later
Celery cancels from elsewhere, a worker with threads or gevent ends when its connection breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .wrapping import wrap


def install(consumer: Any, note: Callable[[bool], None]) -> None:
    """Have `note` told when Celery begins to deal with a connection that broke, and when it has."""

    def handle(before: Callable[[Exception], Any], error: Exception) -> Any:
        note(True)
        try:
            return before(error)
        finally:
            note(False)

    wrap(consumer, "on_connection_error_after_connected", handle)
