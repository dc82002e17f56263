"""Rows of `aliases`: further, globally unique names of jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable

from .statement import Reader, Statement, Transaction

_ADD = Statement("""
INSERT INTO {aliases} (name, job_id)
SELECT r.name, r.job_id FROM json_to_recordset(%(rows)s::json) AS r(name text, job_id bigint) ORDER BY r.name
ON CONFLICT (name) DO UPDATE SET job_id = {aliases}.job_id RETURNING name, job_id""")


def add(executor: Transaction, names: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Add aliases and return each name's job: a name that was already taken keeps its job."""
    rows = [{"name": name, "job_id": job_id} for name, job_id in names]
    return {row.name: row.job_id for row in executor.run(_ADD, rows=json.dumps(rows))}


_REMOVE = Statement("DELETE FROM {aliases} WHERE name = %(name)s AND job_id = %(job_id)s RETURNING name")


def remove(executor: Transaction, name: str, job_id: int) -> bool:
    """Remove an alias of the job; False if the job does not have it."""
    return bool(executor.run(_REMOVE, name=name, job_id=job_id))


_OF = Statement("SELECT name FROM {aliases} WHERE job_id = %(job_id)s ORDER BY name")


def of(executor: Reader, job_id: int) -> list[str]:
    """Read a job's aliases."""
    return [row.name for row in executor.run(_OF, job_id=job_id)]
