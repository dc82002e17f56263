"""Adds the name `asyncio` to those of Celery's pools; read in Celery 5.5.0 and 5.7.0.

`celery worker --pool` accepts the names in `celery.concurrency.ALIASES`, which it has copied when it was imported. If a
later Celery keeps them elsewhere, `--pool asyncio` is refused; `worker_pool` with the class's own name still works.
"""

from __future__ import annotations

from celery import concurrency
from celery.bin.worker import WORKERS_POOL

NAME = "asyncio"
POOL = "celery_sidejob.pools.asyncio:TaskPool"


def install() -> None:
    """Let `--pool asyncio` be chosen; a second call has no effect."""
    if NAME not in concurrency.ALIASES:
        concurrency.ALIASES[NAME] = POOL
        WORKERS_POOL.choices = (*WORKERS_POOL.choices, NAME)
