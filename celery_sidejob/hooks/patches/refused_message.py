"""Replaces `on_unknown_task`, `on_invalid_task` and `on_decode_error` of one worker's `Consumer` of Celery.

Read in Celery 5.5.0 and 5.7.0. Celery rejects a message whose task the worker does not know, and stores a failure as
the result of its task id. It drops a message that it cannot read. If a later Celery asks in another way, that also
happens to messages that have a row: their results show FAILURE until a run has ended, and they come again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace(consumer: Any, by: Callable[[Any, BaseException, bool], bool]) -> None:
    """Have a message that the worker refuses given to `by`; Celery's own way follows if that returns False.

    `by` takes the message, the error, and whether the message names a task that the worker does not know.
    """
    unknown, invalid, undecoded = consumer.on_unknown_task, consumer.on_invalid_task, consumer.on_decode_error

    def on_unknown_task(body: Any, message: Any, exc: BaseException) -> Any:
        return None if by(message, exc, True) else unknown(body, message, exc)

    def on_invalid_task(body: Any, message: Any, exc: BaseException) -> Any:
        return None if by(message, exc, False) else invalid(body, message, exc)

    def on_decode_error(message: Any, exc: BaseException) -> Any:
        return None if by(message, exc, False) else undecoded(message, exc)

    consumer.on_unknown_task = on_unknown_task
    consumer.on_invalid_task = on_invalid_task
    consumer.on_decode_error = on_decode_error
