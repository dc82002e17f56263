"""Rows of `progress`: how far the present or last run of a job has come, as reported by its body."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .statement import Reader, Statement, Transaction, first

_SET = Statement("""
INSERT INTO {progress} AS p (job_id, run_no, done, total, note)
SELECT j.id, j.run_no, %(done)s::double precision, %(total)s::double precision, %(note)s::text FROM {jobs} j
WHERE j.id = %(job_id)s AND j.run_no = %(run_no)s AND j.worker_id = %(worker_id)s
ON CONFLICT (job_id) DO UPDATE SET run_no = excluded.run_no, told_at = now(), done = excluded.done,
  total = excluded.total, note = excluded.note""")


def set_(
    executor: Transaction,
    job_id: int,
    *,
    run_no: int,
    worker_id: int,
    done: float | None,
    total: float | None,
    note: str | None,
) -> None:
    """Store a run's progress, unless the run is no longer the job's current run."""
    executor.run(_SET, job_id=job_id, run_no=run_no, worker_id=worker_id, done=done, total=total, note=note)


_READ = Statement("SELECT run_no, told_at, done, total, note FROM {progress} WHERE job_id = %(job_id)s")


def read(executor: Reader, job_id: int) -> Any | None:
    """Read the last reported progress of a job: (run_no, told_at, done, total, note)."""
    return first(executor.run(_READ, job_id=job_id))


_OF_JOBS = Statement("""
SELECT job_id, run_no, told_at, done, total, note FROM {progress} WHERE job_id = ANY(%(ids)s::bigint[])""")


def of_jobs(executor: Reader, ids: Iterable[int]) -> dict[int, Any]:
    """Read the same for several jobs, by their ids."""
    return {row.job_id: row for row in executor.run(_OF_JOBS, ids=list(ids))}
