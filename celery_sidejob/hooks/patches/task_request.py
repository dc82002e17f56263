"""Replaces `Consumer.on_task_request` of one worker's consumer, and `WorkController._process_task` of its worker.

Read in Celery 5.5.0 and 5.7.0. The first is the function that hands a request to the pool: an attribute that the
strategies of tasks, rate limits and timers for an eta all look up when they are made, which is after our step. Ours
first notes what waits for the pool, and stops fetching before a message fills it. The second is what it comes to, at
once or when the pool has room: an error of the message, which is raised there, would end the worker, or keep a place in
the pool for good. If a later Celery hands requests over in another way, messages wait behind long runs while other
workers have nothing to do, and a malformed one ends a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery.exceptions import InvalidTaskError

from .pool_apply import report
from .wrapping import wrap

MOST_S = 2**31
"""Seconds of a time limit. Celery's pools compare it, or wait for it, where an error ends the worker."""


def install(consumer: Any, handle: Callable[[Callable[[Any], Any], Any], None]) -> None:
    """Have `handle` called with Celery's own function, and the request."""
    worker = consumer.controller
    begins_at_once = consumer.on_task_request == worker._process_task
    wrap(worker, "_process_task", partial(_begin_or_report, worker))
    if begins_at_once:
        consumer.on_task_request = worker._process_task
    wrap(consumer, "on_task_request", handle)


def _begin_or_report(worker: Any, before: Callable[[Any], Any], request: Any) -> None:
    try:
        for limit in request.time_limits:
            if not (limit is None or (isinstance(limit, int | float) and 0 <= limit < MOST_S)):
                raise InvalidTaskError(f"a time limit of the message is no time: {limit!r:.60}")
        before(request)
    except Exception as error:
        report(error, request.on_failure)
        if worker.semaphore is not None:
            worker.semaphore.release()
