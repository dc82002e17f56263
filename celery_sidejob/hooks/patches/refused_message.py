"""Replaces `on_unknown_task`, `on_invalid_task` and `on_decode_error` of one worker's `Consumer` of Celery.

Read in Celery 5.5.0 and 5.7.0. Celery rejects a message whose task the worker does not know, and stores a failure as
the result of its task id. It drops a message that it cannot read. If a later Celery asks in another way, that also
happens to messages that have a row: their results show FAILURE until a run has ended, and they come again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .wrapping import wrap


def replace(consumer: Any, by: Callable[[Any, BaseException, bool], bool]) -> None:
    """Have a message that the worker refuses given to `by`; Celery's own way follows if that returns False.

    `by` takes the message, the error, and whether the message names a task that the worker does not know.
    """
    for name in ("on_unknown_task", "on_invalid_task", "on_decode_error"):
        wrap(consumer, name, partial(_refuse, by, name == "on_unknown_task"))


def _refuse(
    by: Callable[[Any, BaseException, bool], bool], is_unknown: bool, before: Callable[..., Any], *of: Any
) -> Any:
    *_, message, error = of  # the first two functions are also given the body, before these
    return None if by(message, error, is_unknown) else before(*of)
