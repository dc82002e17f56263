"""Rows of `batches` and `batch_members`: named sets of jobs and durable tasks, and how each member has ended.

The end of a member does not touch its batch: the sweeper finds it and notes the outcome. A batch takes members until it
is closed. A transaction that adds a member holds a shared lock on the batch's row until its commit, and closing the
batch waits for that lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..model.checks import MOST
from . import advisory
from .statement import Reader, Statement, Transaction, first, first_value

_COLUMNS = "b.id, b.name, b.calls::text AS calls, b.created_at, b.closed_at, b.ended_at"

_READ = Statement(f"SELECT {_COLUMNS} FROM {{batches}} b WHERE b.name = %(name)s")
_ALL = Statement(f"SELECT {_COLUMNS} FROM {{batches}} b ORDER BY b.id")


def read(executor: Reader, name: str) -> Any | None:
    """Read a batch by its name: (id, name, calls, created_at, closed_at, ended_at)."""
    return first(executor.run(_READ, name=name))


def read_all(executor: Reader) -> Sequence[Any]:
    """Read all batches, oldest first."""
    return executor.run(_ALL)


_OPEN = Statement(f"""
WITH gone AS (
  DELETE FROM {{batches}} WHERE name = %(name)s AND ended_at IS NOT NULL RETURNING id),
made AS (
  INSERT INTO {{batches}} (name, calls) SELECT %(name)s, %(calls)s::json WHERE EXISTS (SELECT FROM gone)
    OR NOT EXISTS (SELECT FROM {{batches}} WHERE name = %(name)s)
  RETURNING *)
SELECT {_COLUMNS} FROM made b""")

LOCK_CLASS = 0x53_4A_42_54 - 0x40_00_00_00
"""The first half of the advisory locks' keys ("SJBT", made to fit as `workers.LOCK_CLASS` is)."""


def open_(executor: Transaction, name: str, calls: str) -> Any | None:
    """Make a batch, replacing an ended batch of this name; None if there is an open batch of this name."""
    advisory.take(executor, LOCK_CLASS, [name])
    return first(executor.run(_OPEN, name=name, calls=calls))


_SHARE = Statement("SELECT id FROM {batches} WHERE id = %(id)s AND closed_at IS NULL FOR SHARE")
_JOIN = Statement("""
INSERT INTO {batch_members} (batch_id, job_id, task_id)
SELECT %(id)s::bigint, m.job_id, NULL FROM unnest(%(job_ids)s::bigint[]) AS m(job_id)
UNION ALL SELECT %(id)s::bigint, NULL, m.task_id FROM unnest(%(task_ids)s::text[]) AS m(task_id)
ON CONFLICT DO NOTHING""")


def join(executor: Transaction, batch_id: int, *, job_ids: Iterable[int] = (), task_ids: Iterable[str] = ()) -> bool:
    """Add members to a batch; False if it is closed, or was deleted. A member that it already has stays as it is."""
    if not executor.run(_SHARE, id=batch_id):
        return False
    executor.run(_JOIN, id=batch_id, job_ids=list(job_ids), task_ids=list(task_ids))
    return True


_NAME = Statement("SELECT name FROM {batches} WHERE id = %(id)s")


def name_of(executor: Reader, batch_id: int) -> str | None:
    """Read a batch's name; None if it was deleted."""
    return first_value(executor.run(_NAME, id=batch_id), str)


_CLOSE = Statement("UPDATE {batches} SET closed_at = now() WHERE id = %(id)s AND closed_at IS NULL")


def close(executor: Transaction, batch_id: int) -> None:
    """Close a batch to further members; waits for transactions that are adding some."""
    executor.run(_CLOSE, id=batch_id)


_DELETE = Statement("DELETE FROM {batches} WHERE id = %(id)s")


def delete(executor: Transaction, batch_id: int) -> None:
    """Remove a batch; its members stay as they are."""
    executor.run(_DELETE, id=batch_id)


_OUTCOME = """CASE
    WHEN m.job_id IS NOT NULL THEN coalesce((
      SELECT CASE WHEN j.status IN ('completed', 'failed', 'terminated') THEN j.status ELSE '' END
      FROM {jobs} j WHERE j.id = m.job_id), 'completed')
    WHEN EXISTS (SELECT FROM {messages} k WHERE k.task_id = m.task_id) THEN ''
    WHEN EXISTS (SELECT FROM {dead} d WHERE d.task_id = m.task_id) THEN 'failed'
    ELSE 'completed' END"""
"""How a member `m` has ended, as SQL; empty if it has not. A durable task ends in success, or in the dead set."""

PAGE = 100

_UNENDED = Statement("SELECT b.id FROM {batches} b WHERE b.ended_at IS NULL AND b.id > %(after)s ORDER BY b.id LIMIT 1")


def next_unended(executor: Reader, *, after: int) -> int | None:
    """Read the id of the first batch that has not ended, after this batch."""
    return first_value(executor.run(_UNENDED, after=after), int)


_NOTE = Statement(f"""
WITH page AS MATERIALIZED (
  SELECT m.id, m.job_id, m.task_id FROM {{batch_members}} m
  WHERE m.batch_id = %(id)s AND m.outcome IS NULL ORDER BY m.batch_id, m.id LIMIT {PAGE}),
seen AS MATERIALIZED (SELECT m.id, {_OUTCOME} AS outcome FROM page m),
noted AS (
  UPDATE {{batch_members}} m SET outcome = seen.outcome FROM seen
  WHERE m.id = seen.id AND m.outcome IS NULL AND seen.outcome <> '' RETURNING m.id)
SELECT (SELECT count(*) FROM page) AS looked_at, (SELECT count(*) FROM noted) AS noted""")


def note_ends(executor: Transaction, batch_id: int) -> Any:
    """Note how members have ended, among the first that have not; returns how many were (looked_at, noted)."""
    return executor.run(_NOTE, id=batch_id)[0]


_LOCK_DONE = Statement(f"""
SELECT {_COLUMNS},
  (SELECT true FROM {{batch_members}} m WHERE m.batch_id = b.id AND m.outcome <> 'completed'
    ORDER BY m.batch_id, m.id LIMIT 1) IS TRUE AS has_failures
FROM {{batches}} b
WHERE b.id = %(id)s AND b.closed_at IS NOT NULL AND b.ended_at IS NULL
  AND (SELECT true FROM {{batch_members}} m WHERE m.batch_id = b.id AND m.outcome IS NULL
    ORDER BY m.batch_id, m.id LIMIT 1) IS NULL
FOR UPDATE OF b SKIP LOCKED""")
_END = Statement("UPDATE {batches} SET ended_at = now() WHERE id = %(id)s")


def lock_if_done(executor: Transaction, batch_id: int) -> Any | None:
    """Lock a closed batch if all its members have ended; None if they have not, or if its row is locked."""
    return first(executor.run(_LOCK_DONE, id=batch_id))


def end(executor: Transaction, batch_id: int) -> None:
    """Note that a locked batch has ended, and that the calls that follow it were made."""
    executor.run(_END, id=batch_id)


_BY_OUTCOME = """count(*) AS total, count(*) FILTER (WHERE o.outcome = 'completed') AS completed,
      count(*) FILTER (WHERE o.outcome = 'failed') AS failed,
      count(*) FILTER (WHERE o.outcome = 'terminated') AS terminated"""
_COUNTS = Statement(f"""
SELECT {_BY_OUTCOME}
FROM (SELECT coalesce(m.outcome, {_OUTCOME}) AS outcome FROM {{batch_members}} m WHERE m.batch_id = %(id)s) o""")


def counts(executor: Reader, batch_id: int) -> Any:
    """Count the present members of a batch: (total, completed, failed, terminated)."""
    return executor.run(_COUNTS, id=batch_id)[0]


_JOBS = Statement("""
SELECT m.job_id FROM {batch_members} m WHERE m.batch_id = %(id)s AND m.job_id IS NOT NULL ORDER BY m.id""")


def job_ids(executor: Reader, batch_id: int) -> list[int]:
    """Read the ids of the jobs of a batch, in the order in which they were added."""
    return [row.job_id for row in executor.run(_JOBS, id=batch_id)]


def _counting(which: str) -> Statement:
    return Statement(f"""
SELECT b.id, b.name, b.calls, b.created_at, b.closed_at, b.ended_at, n.* FROM (
    SELECT {_COLUMNS} FROM {{batches}} b {which} ORDER BY b.id DESC LIMIT %(limit)s) b
  CROSS JOIN LATERAL (
    SELECT {_BY_OUTCOME}
    FROM (
      SELECT m.outcome FROM {{batch_members}} m WHERE m.batch_id = b.id
      ORDER BY m.batch_id, m.job_id LIMIT %(most)s) o) n
ORDER BY b.id DESC""")


_PAGE = _counting("WHERE b.id < %(before)s::bigint")
_COUNTED = _counting("WHERE b.name = %(name)s")


def page(executor: Reader, *, before: int | None, limit: int, most: int) -> Sequence[Any]:
    """Read batches before an id, the newest first, each with the noted ends of at most so many members."""
    return executor.run(_PAGE, before=MOST if before is None else before, limit=limit, most=most)


def counted(executor: Reader, name: str) -> Any | None:
    """Read a batch with the noted ends of all its members."""
    return first(executor.run(_COUNTED, name=name, limit=1, most=None))


_MEMBERS = {
    which: Statement(f"""
SELECT m.job_id, m.task_id, m.outcome, j.task, j.status FROM (
    SELECT o.id, o.job_id, o.task_id, o.outcome FROM {{batch_members}} o
    WHERE o.batch_id = %(batch_id)s AND {condition} ORDER BY o.batch_id, o.id LIMIT %(limit)s) m
  LEFT JOIN LATERAL (SELECT x.task, x.status FROM {{jobs}} x WHERE x.id = m.job_id OFFSET 0) j ON true
ORDER BY m.job_id, m.id""")
    for which, condition in (("open", "o.outcome IS NULL"), ("failed", "o.outcome <> 'completed'"))
}


def members(executor: Reader, batch_id: int, *, which: str, limit: int) -> Sequence[Any]:
    """Read the first members of a batch that are "open", or "failed" or terminated.

    Returns (job_id, task_id, outcome), and the task and status of a job that was not deleted.
    """
    return executor.run(_MEMBERS[which], batch_id=batch_id, limit=limit)
