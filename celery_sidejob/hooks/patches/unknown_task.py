"""Replaces `Consumer.on_unknown_task` of one worker of Celery.

Read in Celery 5.5.0 and 5.7.0. Celery rejects a message whose task the worker does not know, and stores a failure as
the result of its task id. If a later Celery asks in another way, that also happens to messages of jobs: their askings
show FAILURE until a run has ended, and the messages are sent again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace(consumer: Any, by: Callable[[Any], bool]) -> None:
    """Have a message of an unknown task given to `by`; Celery's own way follows if that returns False."""
    before = consumer.on_unknown_task

    def on_unknown_task(body: Any, message: Any, exc: BaseException) -> Any:
        return None if by(message) else before(body, message, exc)

    consumer.on_unknown_task = on_unknown_task
