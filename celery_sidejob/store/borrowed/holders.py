"""The sessions that hold a job's row by a unit in the caller's transaction, marked by an advisory lock.

The row alone does not name the session: Postgres keeps the number of the savepoint in which it was locked. The advisory
locks of all sessions are visible to every role.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..statement import Statement, Transaction
from .borrowed import Borrowed

LOCK_CLASS = 0x53_4A_48_4F - 0x40_00_00_00
"""The first half of the advisory locks' keys ("SJHO", made to fit as `workers.LOCK_CLASS` is)."""


def _key(job_id: str) -> str:
    return f"hashint8({job_id}) # '{{jobs}}'::regclass::oid::int"


def holds_job(job_id: str) -> str:
    """Return the condition that a lock `l` of `pg_locks` marks the holder of a job's row, as SQL."""
    return f"""l.locktype = 'advisory' AND l.classid = {LOCK_CLASS}::oid AND l.objid = ({_key(job_id)})::oid
  AND l.objsubid = 2 AND l.granted
  AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())"""


# It is shared, and only tried: no session waits for it, whatever other session may have taken it.
_MARK = Statement(f"""
SELECT txid_current() AS id, pg_try_advisory_xact_lock_shared({LOCK_CLASS}, {_key("%(id)s::bigint")}) AS marked""")


def mark(borrowed: Borrowed, job_id: int) -> int:
    """Mark the caller's transaction as the holder of a job's row, and return Postgres' number for it."""
    return int(borrowed.run(_MARK, id=job_id)[0].id)


_END = Statement(f"""
SELECT l.pid, pg_terminate_backend(l.pid) AS ended FROM pg_locks l WHERE {holds_job("%(id)s::bigint")}""")


def end(executor: Transaction, job_id: int) -> Sequence[Any]:
    """End the sessions that hold a job's row by a unit in a caller's transaction: (pid, ended). Needs their role."""
    return executor.run(_END, id=job_id)
