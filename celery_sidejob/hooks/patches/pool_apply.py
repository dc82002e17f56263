"""Replaces `TaskPool.on_apply` of one pool, of greenlets or of threads; read in Celery 5.5.0 and 5.7.0.

`BasePool.apply_async` calls it to begin a run. With gevent it waits for a free greenlet, in the greenlet that reads
from the broker: RabbitMQ's next messages would wait unread, and nobody could give them back. With threads it raises
RuntimeError once a cold stop has closed them, as Celery's handler of the signal does wherever it finds the worker. If a
later Celery begins runs in another way, a busy worker with gevent keeps messages, and a cold stop may log an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.worker import state

from .wrapping import wrap


def let_messages_wait(pool: Any) -> None:
    """Let a message that finds all greenlets busy wait in one of its own, and the worker read on."""
    from gevent import spawn  # it is there, as the pool is

    waiting: set[Any] = set()

    def apply_or_wait(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not pool._pool.full() and not waiting:
            return before(*args, **options)
        greenlet = spawn(before, *args, **options)
        waiting.add(greenlet)
        greenlet.link(waiting.discard)
        return None  # there is nothing yet that could be terminated

    wrap(pool, "on_apply", apply_or_wait)


def end_quietly(pool: Any) -> None:
    """Have a cold stop not fail on a message that is just being received, when it has closed the pool's threads.

    The message has not been acknowledged: it is the broker's, as what waits for a thread is.
    """
    if getattr(pool, "executor", None) is not None:
        wrap(pool, "on_apply", _apply_unless_over)


def _apply_unless_over(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return before(*args, **options)
    except RuntimeError:  # "cannot schedule new futures after shutdown"
        if not state.should_terminate:
            raise
        return None
