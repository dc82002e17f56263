"""Replaces `Consumer.on_task_request` of one worker's consumer; read in Celery 5.5.0 and 5.7.0.

It is the function that hands a request to the pool: an attribute that the strategies of tasks, rate limits and timers
for an eta all look up when they are made, which is after our step. Ours first notes what waits for the pool, and stops
fetching before a message fills it. If a later Celery hands requests over in another way, messages wait behind long runs
while other workers have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .wrapping import wrap


def install(consumer: Any, handle: Callable[[Callable[[Any], Any], Any], None]) -> None:
    """Have `handle` called with Celery's own function, and the request."""
    wrap(consumer, "on_task_request", handle)
