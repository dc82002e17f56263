"""Rows of continuations: a publication that follows an asking's end, removed once the broker has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..statement import Statement, Transaction

_ADD = Statement("""
INSERT INTO {messages} (task_id, queue, publication, next_check_at, check_interval)
VALUES (%(key)s, %(queue)s, %(publication)s, now() + interval '2 s', make_interval(secs => %(check_interval_s)s))
ON CONFLICT (task_id) DO NOTHING""")


def add(executor: Transaction, *, key: str, queue: str, publication: str, check_interval_s: float) -> None:
    """Keep a publication that follows an asking's end until the broker has it."""
    executor.run(_ADD, key=key, queue=queue, publication=publication, check_interval_s=check_interval_s)


_REMOVE = Statement("DELETE FROM {messages} WHERE task_id = ANY(%(keys)s::text[]) AND job_id IS NULL")


def remove(executor: Transaction, keys: Iterable[str]) -> None:
    """Forget continuations that were published."""
    executor.run(_REMOVE, keys=list(keys))


_BURY = Statement("""
WITH gone AS (
  DELETE FROM {messages} WHERE task_id = %(key)s AND job_id IS NULL AND locked_by IS NULL RETURNING *)
INSERT INTO {dead} (task_id, task, queue, reason, error, payload)
SELECT %(task_id)s, %(task)s, queue, %(reason)s, %(error)s,
  pg_catalog.json_build_object('v', 1, 'continuation', publication)
FROM gone RETURNING id""")


def bury(executor: Transaction, key: str, *, task_id: str, task: str, reason: str, error: str) -> int | None:
    """Move a continuation to the dead set; returns the entry's id, None if it is gone."""
    found = executor.run(_BURY, key=key, task_id=task_id, task=task, reason=reason, error=error)
    return found[0].id if found else None


_REVIVE = Statement("""
WITH gone AS (
  DELETE FROM {dead} d WHERE d.id = ANY(ARRAY(
      SELECT max(e.id) FROM {dead} e WHERE e.id = ANY(%(ids)s::bigint[]) AND e.job_id IS NULL
        AND e.payload->>'continuation' IS NOT NULL GROUP BY e.task_id))
    AND NOT EXISTS (SELECT FROM {messages} m WHERE m.task_id = %(prefix)s || d.task_id) RETURNING *)
INSERT INTO {messages} (task_id, queue, publication, next_check_at, check_interval)
SELECT %(prefix)s || task_id, queue, payload->>'continuation', now(),
  pg_catalog.make_interval(secs => %(check_interval_s)s) FROM gone RETURNING task_id""")


def revive(executor: Transaction, entry_ids: Sequence[int], *, prefix: str, check_interval_s: float) -> int:
    """Take continuations out of the dead set, for the sweeper to publish; returns their number.

    If several have one id, the newest is taken and the others stay: an id has only one row.
    """
    return len(executor.run(_REVIVE, ids=list(entry_ids), prefix=prefix, check_interval_s=check_interval_s))
