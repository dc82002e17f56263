"""Advisory locks that a call waits for, and those that mark the sessions which hold a job's row.

Any role that may connect can hold such a lock, so every wait is bounded. A unit in the caller's transaction marks its
session: the row alone does not name it, because Postgres keeps the number of the savepoint in which the row was locked.
The advisory locks of all sessions are visible to every role.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from .borrowed.borrowed import LOCK_NOT_AVAILABLE, Borrowed, code_of
from .errors import LockHeld
from .statement import Reader, Statement, Transaction, first

LONGEST_WAIT_S = 10.0
"""The longest wait of a call. A transaction with a lock_timeout, such as a service's, waits no longer than that."""

ONE = ""
"""The key of a lock that is the only lock of its class in a schema."""

_HASH = f"hashtext(coalesce(nullif(u.key, '{ONE}'), '{{meta}}'))"

_TAKE = Statement(f"""
WITH before AS MATERIALIZED (SELECT current_setting('lock_timeout') AS wait),
bound AS MATERIALIZED (
  SELECT b.wait, set_config('lock_timeout', CASE b.wait WHEN '0' THEN %(wait_ms)s::text ELSE b.wait END, true)
  FROM before b),
taken AS MATERIALIZED (
  SELECT pg_advisory_xact_lock(%(lock_class)s::int, h.hash)
  FROM bound, (SELECT DISTINCT {_HASH} AS hash FROM unnest(%(keys)s::text[]) AS u(key) ORDER BY 1) h)
SELECT set_config('lock_timeout', b.wait, true) FROM bound b WHERE (SELECT count(*) FROM taken) >= 0""")


def take(executor: Transaction, lock_class: int, keys: Iterable[str]) -> None:
    """Wait until no other transaction holds any of these locks; this transaction then holds them to its end.

    Raises LockHeld if that takes too long.
    """
    keys = list(keys)
    try:
        executor.run(_TAKE, keys=keys, lock_class=lock_class, wait_ms=str(round(LONGEST_WAIT_S * 1000)))
    except Exception as error:
        if code_of(error) == LOCK_NOT_AVAILABLE:
            raise LockHeld(partial(holder, lock_class=lock_class, keys=keys)) from error
        raise


_HOLDERS = Statement(f"""
SELECT a.pid, a.usename::text AS role, a.application_name AS application, a.state,
  extract(epoch FROM clock_timestamp() - a.xact_start)::double precision AS open_s
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.classid = %(lock_class)s::int::oid
  AND l.objid = ANY(ARRAY(SELECT ({_HASH})::oid FROM unnest(%(keys)s::text[]) AS u(key)))
  AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
ORDER BY a.xact_start, a.pid LIMIT 1""")


def holder(executor: Reader, lock_class: int, keys: Iterable[str]) -> str:
    """Return the session that holds one of these locks, for an error's text."""
    row = first(executor.run(_HOLDERS, lock_class=lock_class, keys=list(keys)))
    if row is None:
        return "a session that has ended meanwhile"
    since = "" if row.open_s is None else f", for {row.open_s:.0f} s"
    return f"the session {row.pid} of the role {row.role!r} ({row.application or 'no name'}, {row.state}{since})"


HOLDERS_LOCK_CLASS = 0x53_4A_48_4F - 0x40_00_00_00
"""The first half of the advisory locks' keys ("SJHO", made to fit as `workers.LOCK_CLASS` is)."""


def _job_key(job_id: str) -> str:
    return f"hashint8({job_id}) # '{{jobs}}'::regclass::oid::int"


def holds_job(job_id: str) -> str:
    """Return the condition that a lock `l` of `pg_locks` marks the holder of a job's row, as SQL."""
    return f"""l.locktype = 'advisory' AND l.classid = {HOLDERS_LOCK_CLASS}::oid AND l.objid = ({_job_key(job_id)})::oid
  AND l.objsubid = 2 AND l.granted
  AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())"""


# It is shared, and only tried: no session waits for it, whatever other session may have taken it.
_MARK_JOB = Statement(f"""
SELECT txid_current() AS id,
  pg_try_advisory_xact_lock_shared({HOLDERS_LOCK_CLASS}, {_job_key("%(id)s::bigint")}) AS marked""")


def mark_job(borrowed: Borrowed, job_id: int) -> int:
    """Mark the caller's transaction as the holder of a job's row, and return Postgres' number for it."""
    return int(borrowed.run(_MARK_JOB, id=job_id)[0].id)


_END_HOLDERS = Statement(f"""
SELECT l.pid, pg_terminate_backend(l.pid) AS ended FROM pg_locks l WHERE {holds_job("%(id)s::bigint")}""")


def end_holders(executor: Transaction, job_id: int) -> Sequence[Any]:
    """End the sessions that hold a job's row by a unit in a caller's transaction: (pid, ended). Needs their role."""
    return executor.run(_END_HOLDERS, id=job_id)
