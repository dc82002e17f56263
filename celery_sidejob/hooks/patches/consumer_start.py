"""Replaces `Blueprint.start` of one worker's consumer; read in Celery 5.5.0 and 5.7.0.

Celery's `Consumer.start` calls ``blueprint.start(consumer)`` in a loop, and connects again after what is among the
connection's errors. It declares its queues, binds them, is busy for a while, and consumes: RabbitMQ's answer to a queue
that was deleted meanwhile (`NotFound`) is no error of the connection, and would end the worker. Ours makes it one: with
a new connection all is declared again. If a later Celery starts in another way, such a deletion ends a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amqp.exceptions import NotFound, RecoverableConnectionError

from .wrapping import wrap


def install(blueprint: Any) -> None:
    """Have a queue that is deleted while a worker connects break its connection, and not the worker."""
    wrap(blueprint, "start", _start)


def _start(before: Callable[[Any], None], consumer: Any) -> None:
    try:
        before(consumer)
    except NotFound as error:
        # What its user declares by himself has to be there.
        if any(queue.no_declare for queue in consumer.app.amqp.queues.consume_from.values()):
            raise
        raise RecoverableConnectionError(f"a queue of this worker was deleted: {error}") from error
