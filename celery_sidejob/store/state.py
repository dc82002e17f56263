"""Rows of `state`: the user's JSON on a job, a row for each key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

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
