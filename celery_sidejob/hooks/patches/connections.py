"""Replaces methods of one connection to a broker: of its channels, its consumers and their QoS, in kombu and py-amqp.

Several functions replace `Connection.drain_events` of one connection of a worker. Read in kombu 5.5.2 and 5.7.0, and
its callers in Celery 5.5.0 and 5.7.0: the loops of workers call it with `timeout` as a keyword, and wait in it for the
broker. Each of these functions adds one behaviour, and several may be added to one connection. If a later Celery waits
in another way, none of them has an effect: each function says what is then missing.

Others replace `can_consume`, `can_consume_max_estimate`, `ack` and `reject` of the QoS of one channel. Read in kombu
5.5.2 and 5.7.0. The channel asks the first two before it fetches, kombu's own on Redis and those of our transports
(`transport/*/acknowledgements.py`), and both read `prefetch_count`; the last two are called when a message is over.
Ours fetches as many messages as a worker has room for, and notifies a worker with gevent when there is room again. If a
later kombu does not ask before it fetches, a worker keeps messages that it cannot begin, until they have waited for a
second and are given back.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from amqp.exceptions import ConsumerCancelled

from . import wrap

T = TypeVar("T")


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
    tell_of_ends(qos, done.set)

    def drain_events(before: Callable[..., Any], timeout: float | None = None, **options: Any) -> Any:
        done.clear()
        if not qos.can_consume():
            done.wait(timeout)
            timeout = timeout if qos.can_consume() else 0  # kombu does its other duties meanwhile
        return before(timeout=timeout, **options)

    wrap(connection, "drain_events", drain_events)
    return done.set


def limit_fetching(qos: Any, *, may: Callable[[], bool], room: Callable[[], int], beyond: Callable[[], int]) -> None:
    """Fetch only as many messages as there is room for, and only while `may` returns True.

    `beyond`: how many more Celery's limit lets through than it says.
    """

    def asked(before: Callable[[], T]) -> T:
        limit = qos.prefetch_count
        qos.prefetch_count = limit and limit + beyond()  # zero is none
        try:
            return before()
        finally:
            qos.prefetch_count = limit

    def can_consume(before: Callable[[], bool]) -> bool:
        allowed = may()
        return bool(asked(before) and allowed)

    def can_consume_max_estimate(before: Callable[[], int | None]) -> int:
        free = asked(before)
        return room() if free is None else min(free, room())

    wrap(qos, "can_consume", can_consume)
    wrap(qos, "can_consume_max_estimate", can_consume_max_estimate)


def tell_of_ends(qos: Any, tell: Callable[[], None]) -> None:
    """Call `tell` after each message that was acknowledged or rejected."""

    def end(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return before(*args, **options)
        finally:
            tell()

    wrap(qos, "ack", end)
    wrap(qos, "reject", end)


def is_redis(channel: Any) -> bool:
    """Tell whether this is a channel of kombu's Redis transport or ours; with another broker neither is imported."""
    redis = sys.modules.get("kombu.transport.redis")
    return redis is not None and isinstance(channel, redis.Channel)


def keep_client(channel: Any) -> None:
    """Make the channel keep one client for each pool of connections that it opens; only with kombu's Redis transport.

    Replaces `Channel._create_client` of one channel of kombu's Redis transport; read in kombu 5.5.2 and 5.7.0.

    kombu makes a client for each command, which takes longer than sending the command (0.2 ms). A publication has one
    command; a delivery has two, for the note at its arrival and its removal at the acknowledgement. A client has no
    state but its pool, which kombu already shares between clients. Our own transport does the same in its channel. If a
    later kombu makes clients by another name, they are made for each command again.
    """
    if not hasattr(channel, "_create_client"):
        return
    kept: Any = None

    def create(before: Any, asynchronous: bool = False) -> Any:
        nonlocal kept
        if asynchronous:  # a channel has one of these, and keeps it
            return before(asynchronous=True)
        if getattr(channel.connection, "client", None) is None:
            # Closed a second time, after the first time failed half-way and the connection was given up. kombu would
            # read the address of a connection that is gone, and the AttributeError would end a worker that reconnects.
            from redis.exceptions import ConnectionError  # here: on other brokers nothing imports it

            raise ConnectionError("This connection to Redis was given up.")
        if kept is None or kept.connection_pool is not channel.pool:
            kept = before()
        return kept

    wrap(channel, "_create_client", create)


def replace_consume(consumer: Any, by: Callable[[], None]) -> Callable[[], None]:
    """Let `by` begin the consumer; returns kombu's own method.

    Replaces `Consumer.consume` of kombu, and `QoS.callback` of kombu, of one worker on RabbitMQ.

    Read in kombu 5.5.2 and 5.7.0, Celery 5.5.0 and 5.7.0. By the first Celery's loop begins to consume; by the second,
    an attribute that its QoS calls with `prefetch_count`, it tells RabbitMQ how many messages it may send. The worker's
    appetite decides both (`hooks/worker/fetching.py`). If a later Celery does either in another way, RabbitMQ sends as
    many messages as `worker_prefetch_multiplier` says, and messages wait behind long runs.
    """
    before: Callable[[], None] = consumer.consume
    consumer.consume = by
    return before


def replace_prefetch(qos: Any, by: Callable[..., None]) -> Callable[..., Any]:
    """Give a prefetch to `by`, called with the keyword `prefetch_count`; returns the function that tells RabbitMQ."""
    before: Callable[..., Any] = qos.callback
    qos.callback = by
    return before
