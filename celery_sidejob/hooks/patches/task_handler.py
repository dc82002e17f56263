"""Replaces `Consumer.create_task_handler` of one worker's consumer; read in Celery 5.5.0 and 5.7.0.

It returns the function that is called with each message. Celery gives a message up over two kinds of errors; any other,
such as a task's name that is a list, ends the worker, or looks as if its broker had gone: then the message comes again
at once. Whoever can write into a queue could keep all its workers from working. If a later Celery takes messages
elsewhere, one malformed message ends a worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from .wrapping import wrap

logger = logging.getLogger("celery_sidejob")

OF_MESSAGES = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What a malformed message raises, though kombu may count it among the errors of a connection, as KeyError."""


def install(consumer: Any) -> None:
    """Have a message that cannot be taken given up, whatever it holds, and the worker go on with the next."""
    wrap(consumer, "create_task_handler", partial(_create, consumer))


def _create(consumer: Any, before: Callable[[], Callable[[Any], Any]]) -> Callable[[Any], None]:
    take = before()
    errors = (*consumer.connection_errors, *consumer.channel_errors, MemoryError)
    not_of_messages = tuple(error for error in errors if not issubclass(error, OF_MESSAGES))

    def take_or_give_up(message: Any) -> None:
        try:
            take(message)
        except not_of_messages:
            raise
        except Exception as error:
            if message.acknowledged:
                logger.exception("A message was given up, but that could not be told to all who want to know of it")
            else:
                consumer.on_invalid_task(None, message, error)

    return take_or_give_up
