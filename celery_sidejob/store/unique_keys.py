"""Unique keys of open jobs: a key is in the job's first asking, and is taken until that asking is closed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import advisory
from .statement import Reader, Statement, Transaction

LOCK_CLASS = 0x53_4A_55_51 - 0x40_00_00_00
"""The first half of the advisory locks' keys ("SJUQ", made to fit as `workers.LOCK_CLASS` is)."""


def take_turn(executor: Transaction, keys: Iterable[str]) -> None:
    """Wait until no other transaction makes a job with one of these keys; later statements see its commit."""
    advisory.take(executor, LOCK_CLASS, keys)


_HOLDERS = Statement("""
SELECT a.unique_key AS key, a.task_id, a.job_id, j.ran_at IS NULL AND j.status = 'queued' AS waits
FROM {askings} a JOIN {jobs} j ON j.id = a.job_id
WHERE a.unique_key = ANY(%(keys)s::text[]) AND a.closed_at IS NULL""")


def holders(executor: Reader, keys: Iterable[str]) -> Sequence[Any]:
    """Read the open jobs with these keys: (key, task_id, job_id, waits). `waits`: no run or shutdown has begun."""
    return executor.run(_HOLDERS, keys=list(keys))


_FREE = Statement("UPDATE {askings} SET unique_key = NULL WHERE job_id = %(job_id)s AND closed_at IS NULL")


def free(executor: Transaction, job_id: int) -> None:
    """Remove the key of a locked job, which another job replaces."""
    executor.run(_FREE, job_id=job_id)
