"""A worker with gevent: what of Celery would stop all greenlets, or keep the next message waiting."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kombu.utils import functional


def mind(pool: Any) -> None:
    """Have Celery wait where greenlets may, if this pool runs them; for the start of a worker."""
    if getattr(pool, "is_green", False):
        _pause_as_greenlets_do()
        _handle_signals_in_greenlets()
        _let_messages_wait(pool)


def _pause_as_greenlets_do() -> None:
    """Let bodies go on while kombu pauses between two tries to connect: up to half a minute, on a broker that is down.

    gevent looks at all objects there are when it replaces Python's locks, celery's lazy names among them, which import
    kombu; and replaces `time.sleep` only after that.
    """
    functional.sleep = time.sleep


def _let_messages_wait(pool: Any) -> None:
    """Let a message that finds all greenlets busy wait in one of its own, and the worker read on.

    Else RabbitMQ's next messages would wait unread, and nobody could give them back.
    """
    from gevent import spawn  # it is there, as the pool is

    apply = pool.on_apply
    waiting: set[Any] = set()

    def apply_or_wait(*args: Any, **options: Any) -> Any:
        if not pool._pool.full() and not waiting:
            return apply(*args, **options)
        greenlet = spawn(apply, *args, **options)
        waiting.add(greenlet)
        greenlet.link(waiting.discard)
        return None  # there is nothing yet that could be terminated

    pool.on_apply = apply_or_wait


def _handle_signals_in_greenlets() -> None:
    """Have Celery's handlers of stops run where they may wait, as those of a cold and of a soft stop do.

    A signal mostly finds a worker with gevent in its hub, where whatever waits raises.
    """
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, partial(_handle_in_greenlet, handler))


def _handle_in_greenlet(handler: Callable[[int, Any], Any], number: int, frame: Any) -> None:
    from gevent import spawn  # it is there, as the pool is

    spawn(handler, number, frame)


def look_without_waiting(dispatcher: Any) -> None:
    """Have the worker look at what RabbitMQ says on its connection for events, and not wait for it.

    With gevent Celery does so after each thing it has received, and waits a tenth of a second for a heartbeat of the
    broker to come: a worker would receive ten messages a second.
    """
    connection = dispatcher.connection
    drain = connection.drain_events

    def drain_events(**options: Any) -> Any:
        return drain(**{**options, "timeout": 0})

    connection.drain_events = drain_events


def fetch_when_there_is_room(connection: Any, channel: Any) -> Callable[[], None]:
    """Have the worker fetch from Redis as soon as one of the messages that it holds is acknowledged.

    With gevent and all fetched that may be, kombu 5.7 looks only every two seconds whether it may fetch again. What is
    returned has it look now.
    """
    qos, drain = channel.qos, connection.drain_events
    done = threading.Event()

    def and_tell(act: Callable[..., Any]) -> Callable[..., Any]:
        def act_and_tell(*args: Any, **options: Any) -> Any:
            try:
                return act(*args, **options)
            finally:
                done.set()

        return act_and_tell

    def drain_events(timeout: float | None = None, **options: Any) -> Any:
        done.clear()
        if not qos.can_consume():
            done.wait(timeout)
            timeout = timeout if qos.can_consume() else 0  # kombu does its other duties all the same
        return drain(timeout=timeout, **options)

    qos.ack, qos.reject = and_tell(qos.ack), and_tell(qos.reject)
    connection.drain_events = drain_events
    return done.set
