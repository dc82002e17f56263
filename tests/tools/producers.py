"""The producers of an app's pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from celery import Celery


@contextmanager
def all_producers(app: Celery) -> Iterator[None]:
    """Take all producers of the app's pool, so that a call that needs one fails or waits.

    A pool with one producer would be simpler, but `broker_pool_limit` is the limit of all pools of the process: a new
    one closes what earlier tests left in theirs, and a connection to a server that has ended since waits for ever.
    """
    with ExitStack() as taken:
        for _ in range(app.producer_pool.limit):
            taken.enter_context(app.producer_pool.acquire(timeout=1))
        yield
