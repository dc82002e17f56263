"""A worker with gevent: what of Celery would stop all greenlets, or keep the next message waiting."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from ..patches import pools


def install(pool: Any) -> None:
    """Have Celery wait where greenlets may, if this pool runs them; for the start of a worker."""
    if getattr(pool, "is_green", False):
        pools.pause_in_greenlets()
        _handle_signals_in_greenlets()
        pools.let_messages_wait(pool)


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
