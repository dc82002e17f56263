"""Replaces `TaskPool.flush` of one pool of processes; read in Celery 5.5.0 and 5.7.0.

When the connection to the broker broke, `Consumer.on_close` calls it to drop what the pool has not begun. Celery 5.5
forgets with it, in `AsynPool._cache`, what runs: the worker then hears nothing of the end of these runs, nor that their
process died, and they keep their places in the pool for ever. Celery 5.7 forgets only what was sent to a process that
has not said yet that it begins; it begins all the same. Ours has the pool remember both. If a later Celery forgets them
elsewhere, a worker begins fewer runs at a time after each break, and runs again what it has sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .wrapping import wrap


def install(pool: Any) -> None:
    """Have a pool of processes remember what runs in it, or will."""
    processes = getattr(pool, "_pool", None)
    if hasattr(processes, "_cache"):
        wrap(pool, "flush", partial(_flush, processes))


def _flush(processes: Any, before: Callable[[], None]) -> None:
    known = dict(processes._cache)
    before()
    sent = {number: job for number, job in known.items() if job._accepted or job._write_to}  # or half sent before
    processes._cache.update((number, job) for number, job in sent.items() if not job.ready())
