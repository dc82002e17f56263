"""Replaces `Connection.drain_events` of one connection of a worker.

Read in kombu 5.5.2 and 5.7.0, and its callers in Celery 5.5.0 and 5.7.0: the loops of workers call it with `timeout` as
a keyword, and wait in it for what the broker sends. Each function here adds one thing, and several may be put on one
connection. If a later Celery waits in another way, nothing of it is done: each function says what is then missing.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

from amqp.exceptions import ConsumerCancelled

from . import virtual_qos
from .wrapping import wrap


def hear_cancellations(connection: Any) -> None:
    """Have Celery's event loop hear of a consumer that RabbitMQ cancels in the first moments of consuming.

    RabbitMQ does so when the queue is deleted. What breaks the connection at any other time, so that all is declared
    again, `_quick_drain` of celery.worker.loops passes over, as every error without a number: the worker would stay
    connected, and be given nothing any more.
    """
    wrap(connection, "drain_events", _telling_of_cancellations)


def _telling_of_cancellations(before: Callable[..., Any], **options: Any) -> Any:
    try:
        return before(**options)
    except ConsumerCancelled as cancelled:
        cancelled.errno = errno.ECONNRESET
        raise


def notice_breaks(connection: Any) -> None:
    """Have Celery's loop for greenlets hear that the connection it consumes from broke, whoever has seen it first.

    Where that is a body's acknowledgement, because the loop waited for a free greenlet, the error is logged and gone.
    kombu then connects again at the next look, without a word and without consumers: the worker would be given nothing
    any more.
    """
    consuming = connection.connection

    def drain_events(before: Callable[..., Any], **options: Any) -> Any:
        if not connection.connected or connection.connection is not consuming:
            raise ConnectionResetError(errno.ECONNRESET, "the connection to consume from is gone")
        return before(**options)

    wrap(connection, "drain_events", drain_events)


def look_without_waiting(connection: Any) -> None:
    """Have the worker look at what RabbitMQ says on its connection for events, and not wait for it.

    With gevent Celery does so after each thing it has received, and waits a tenth of a second for a heartbeat of the
    broker to come: a worker would receive ten messages a second.
    """
    wrap(connection, "drain_events", lambda before, **options: before(**{**options, "timeout": 0}))


def call_before_waits(connection: Any, call: Callable[[], bool], *, look_s: float) -> None:
    """Have `call` called before each wait, which is then no longer than `look_s` if it returns True.

    With gevent only the greenlet that reads may wait for an answer of RabbitMQ: a worker that has cancelled its
    consumers would consume again no more.
    """

    def drain_events(before: Callable[..., Any], timeout: float | None = None, **options: Any) -> Any:
        if call():
            timeout = look_s if timeout is None else min(timeout, look_s)
        return before(timeout=timeout, **options)

    wrap(connection, "drain_events", drain_events)


def fetch_when_there_is_room(connection: Any, qos: Any) -> Callable[[], None]:
    """Have the worker fetch from Redis as soon as one of the messages that it holds is acknowledged.

    With gevent and all fetched that may be, kombu 5.7 looks only every two seconds whether it may fetch again. What is
    returned has it look now.
    """
    done = threading.Event()
    virtual_qos.tell_of_ends(qos, done.set)

    def drain_events(before: Callable[..., Any], timeout: float | None = None, **options: Any) -> Any:
        done.clear()
        if not qos.can_consume():
            done.wait(timeout)
            timeout = timeout if qos.can_consume() else 0  # kombu does its other duties all the same
        return before(timeout=timeout, **options)

    wrap(connection, "drain_events", drain_events)
    return done.set
