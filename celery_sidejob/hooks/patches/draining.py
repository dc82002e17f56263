"""Replaces `Connection.drain_events` of one connection of a worker.

Read in kombu 5.5.2 and 5.7.0, and its callers in Celery 5.5.0 and 5.7.0: the loops of workers call it with `timeout` as
a keyword, and wait in it for the broker. Each function here adds one behaviour, and several may be added to one
connection. If a later Celery waits in another way, none of them has an effect: each function says what is then missing.
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
    """Let Celery's event loop learn of a consumer that RabbitMQ cancels in the first moments of consuming.

    RabbitMQ does so when the queue is deleted. At any other time this breaks the connection, so that all queues are
    declared again. But `_quick_drain` of celery.worker.loops ignores it, like every error without a number: the worker
    would stay connected, and get no more messages.
    """
    wrap(connection, "drain_events", _telling_of_cancellations)


def _telling_of_cancellations(before: Callable[..., Any], **options: Any) -> Any:
    try:
        return before(**options)
    except ConsumerCancelled as cancelled:
        cancelled.errno = errno.ECONNRESET
        raise


def notice_breaks(connection: Any) -> None:
    """Let Celery's loop for greenlets learn that its connection broke, even if another greenlet has noticed it first.

    If a body's acknowledgement notices it, because the loop waited for a free greenlet, the error is logged and gone.
    kombu then silently connects again at the next read, without consumers: the worker would get no more messages.
    """
    consuming = connection.connection

    def drain_events(before: Callable[..., Any], **options: Any) -> Any:
        if not connection.connected or connection.connection is not consuming:
            raise ConnectionResetError(errno.ECONNRESET, "the connection to consume from is gone")
        return before(**options)

    wrap(connection, "drain_events", drain_events)


def look_without_waiting(connection: Any) -> None:
    """Let the worker read from RabbitMQ on its connection for events without waiting.

    With gevent Celery reads there after each message, and waits a tenth of a second for a heartbeat of the broker: a
    worker would receive ten messages a second.
    """
    wrap(connection, "drain_events", lambda before, **options: before(**{**options, "timeout": 0}))


def call_before_waits(connection: Any, call: Callable[[], bool], *, look_s: float) -> None:
    """Call `call` before each wait; if it returns True, the wait lasts at most `look_s`.

    With gevent only the greenlet that reads may wait for an answer of RabbitMQ: a worker that has cancelled its
    consumers would consume again no more.
    """

    def drain_events(before: Callable[..., Any], timeout: float | None = None, **options: Any) -> Any:
        if call():
            timeout = look_s if timeout is None else min(timeout, look_s)
        return before(timeout=timeout, **options)

    wrap(connection, "drain_events", drain_events)


def fetch_when_there_is_room(connection: Any, qos: Any) -> Callable[[], None]:
    """Let the worker fetch from Redis as soon as one of its messages is acknowledged.

    With gevent, kombu 5.7 checks only every two seconds whether it may fetch again after a full prefetch. The returned
    function makes it check now.
    """
    done = threading.Event()
    virtual_qos.tell_of_ends(qos, done.set)

    def drain_events(before: Callable[..., Any], timeout: float | None = None, **options: Any) -> Any:
        done.clear()
        if not qos.can_consume():
            done.wait(timeout)
            timeout = timeout if qos.can_consume() else 0  # kombu does its other duties meanwhile
        return before(timeout=timeout, **options)

    wrap(connection, "drain_events", drain_events)
    return done.set
