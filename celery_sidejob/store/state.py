"""Rows of `state` and `progress`: the user's JSON on a job, a row for each key; and how far a run has come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .statement import Reader, Statement, Transaction

_SET = Statement("""
INSERT INTO {state} (job_id, key, value)
SELECT r.job_id, r.key, r.value::json
FROM json_to_recordset(%(rows)s::json) AS r(job_id bigint, key text, value text) ORDER BY r.job_id, r.key
ON CONFLICT (job_id, key) DO UPDATE SET value = excluded.value""")


def put(executor: Transaction, values: Mapping[tuple[int, str], str]) -> None:
    """Set keys of jobs, {(job id, key): JSON text}."""
    rows = [{"job_id": job_id, "key": key, "value": value} for (job_id, key), value in values.items()]
    executor.run(_SET, rows=json.dumps(rows))


_UNSET = Statement("DELETE FROM {state} WHERE job_id = %(job_id)s AND key = ANY(%(keys)s::text[])")


def remove(executor: Transaction, job_id: int, keys: Iterable[str]) -> None:
    """Remove keys; missing keys are ignored."""
    executor.run(_UNSET, job_id=job_id, keys=list(keys))


_READ = Statement("SELECT key, value::text AS value FROM {state} WHERE job_id = %(job_id)s ORDER BY key")
_READ_KEY = Statement("""
SELECT key, value::text AS value FROM {state} WHERE job_id = %(job_id)s AND key = %(key)s""")


def read(executor: Reader, job_id: int, key: str | None = None) -> dict[str, str]:
    """Read a job's state, or one key of it, as {key: JSON text}."""
    found = executor.run(_READ, job_id=job_id) if key is None else executor.run(_READ_KEY, job_id=job_id, key=key)
    return {row.key: row.value for row in found}


_SET_PROGRESS = Statement("""
INSERT INTO {progress} AS p (job_id, run_no, done, total, note)
SELECT j.id, j.run_no, %(done)s::double precision, %(total)s::double precision, %(note)s::text FROM {jobs} j
WHERE j.id = %(job_id)s AND j.run_no = %(run_no)s AND j.worker_id = %(worker_id)s
ON CONFLICT (job_id) DO UPDATE SET run_no = excluded.run_no, told_at = now(), done = excluded.done,
  total = excluded.total, note = excluded.note""")


def set_progress(
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
    executor.run(_SET_PROGRESS, job_id=job_id, run_no=run_no, worker_id=worker_id, done=done, total=total, note=note)


_PROGRESS = Statement("""
SELECT job_id, run_no, told_at, done, total, note FROM {progress} WHERE job_id = ANY(%(ids)s::bigint[])""")


def progress_of_jobs(executor: Reader, ids: Iterable[int]) -> dict[int, Any]:
    """Read the last reported progress of jobs, {job id: (job_id, run_no, told_at, done, total, note)}."""
    return {row.job_id: row for row in executor.run(_PROGRESS, ids=list(ids))}


def progress(executor: Reader, job_id: int) -> Any | None:
    """Read the same for one job; None without any."""
    return progress_of_jobs(executor, [job_id]).get(job_id)
