"""Rows of `tracked`: the jobs that people follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .jobs import HANDLE
from .statement import Reader, Statement, Transaction

MOST = 10_000
"""The most tracked jobs that are followed at once; the last ones count."""

_TRACK = Statement("INSERT INTO {tracked} (job_id) VALUES (%(job_id)s) ON CONFLICT DO NOTHING")
_UNTRACK = Statement("DELETE FROM {tracked} WHERE job_id = %(job_id)s")


def track(executor: Transaction, job_id: int, *, on: bool) -> None:
    """Begin or cease to track a job; repeating it has no effect."""
    executor.run(_TRACK if on else _UNTRACK, job_id=job_id)


_IS_TRACKED = Statement("SELECT job_id FROM {tracked} WHERE job_id = %(job_id)s")


def is_tracked(executor: Reader, job_id: int) -> bool:
    """Tell whether a job is tracked."""
    return bool(executor.run(_IS_TRACKED, job_id=job_id))


_LIST = Statement(f"""
SELECT {HANDLE} FROM (SELECT job_id, place FROM {{tracked}} ORDER BY place DESC LIMIT %(limit)s) t
CROSS JOIN LATERAL (SELECT * FROM {{jobs}} x WHERE x.id = t.job_id OFFSET 0) j ORDER BY t.place""")


def page(executor: Reader, limit: int) -> Sequence[Any]:
    """Read the jobs that were tracked last, in the order in which they were tracked."""
    return executor.run(_LIST, limit=limit)


_IDS = Statement("SELECT job_id FROM {tracked} ORDER BY place DESC LIMIT %(limit)s")


def ids(executor: Reader) -> frozenset[int]:
    """Read the ids of the tracked jobs."""
    return frozenset(row.job_id for row in executor.run(_IDS, limit=MOST))
