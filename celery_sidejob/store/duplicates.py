"""Rows of `duplicates`: messages of which another store may have a copy, while the copy here is the one that counts.

If an answer was lost, a publisher does not know whether a store has its message, and gives it to the next store too.
Both copies have the same `call`. A copy does not run, and is not declared lost or expired, if another store has such a
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .statement import Autocommit, Reader, Statement, Transaction, columns

KEPT_S = 7 * 86400.0
"""Seconds after its due time for which a message is remembered: a copy may appear in a store that comes back."""
RECENT_S = 86400.0
"""Seconds after its begin for which a message is remembered if another store may still receive a copy."""

Copy = tuple[str, str]
"""(task id, call)"""

_NOTE = Statement("""
INSERT INTO {duplicates} (task_id, call, tried, kept_until)
SELECT r.task_id, r.call, %(tried)s::text[],
  greatest(now(), (SELECT m.due_at FROM {messages} m WHERE m.task_id = r.task_id)) + make_interval(secs => %(kept_s)s)
FROM unnest(%(task_ids)s::text[], %(calls)s::text[]) AS r(task_id, call)
ON CONFLICT (task_id, call) DO NOTHING""")


def note(executor: Transaction, copies: Iterable[Copy], *, tried: Sequence[str] = (), kept_s: float) -> None:
    """Note that the copies here are the ones that count; `tried` are the stores that may have other copies."""
    executor.run(_NOTE, **columns(list(copies), "task_ids", "calls"), tried=list(tried), kept_s=kept_s)


_TRIED = Statement("""
SELECT task_id, call, tried FROM {duplicates}
WHERE task_id = ANY(%(task_ids)s::text[]) AND tried OPERATOR(pg_catalog.<>) ARRAY[]::text[]""")


def tried(executor: Reader, task_ids: Iterable[str]) -> dict[Copy, tuple[str, ...]]:
    """Read which other stores may have these messages: {(task id, call): the names of the stores}."""
    rows = executor.run(_TRIED, task_ids=list(task_ids))
    return {(row.task_id, row.call): tuple(row.tried) for row in rows}


_SETTLE = Statement("""
UPDATE {duplicates} SET tried = ARRAY[]::text[] WHERE task_id = %(task_id)s AND call = %(call)s RETURNING task_id""")


def settle(executor: Transaction, copy: Copy) -> bool:
    """Decide that this store's copy runs, if it was noted as the one that counts; other copies give way to it.

    False if there is no note: this store has no copy, or its copy has given way itself.
    """
    return bool(executor.run(_SETTLE, task_id=copy[0], call=copy[1]))


_TAKE = Statement("""
WITH gone AS (
  DELETE FROM {messages} WHERE task_id = %(task_id)s AND body IS NOT NULL AND locked_by IS NULL AND doom IS NULL
    AND generation = 1 AND publication::json->>'call' = %(call)s RETURNING task_id),
forgotten AS (
  DELETE FROM {duplicates} WHERE task_id = %(task_id)s AND call = %(call)s AND EXISTS (SELECT FROM gone))
SELECT NOT EXISTS (SELECT FROM gone) AND (
  EXISTS (SELECT FROM {duplicates} WHERE task_id = %(task_id)s AND call = %(call)s)
  OR EXISTS (SELECT FROM {messages} WHERE task_id = %(task_id)s AND body IS NOT NULL AND generation = 1
    AND publication::json->>'call' = %(call)s)) AS begun""")


def take(executor: Transaction, copy: Copy) -> bool:
    """Remove this store's copy and forget it, unless it has been run or buried; True in that case."""
    return bool(executor.run(_TAKE, task_id=copy[0], call=copy[1])[0].begun)


_FORGET = Statement("DELETE FROM {duplicates} WHERE task_id = %(task_id)s AND call = %(call)s")
_GIVE_WAY = Statement("""
DELETE FROM {duplicates}
WHERE task_id = %(task_id)s AND call = %(call)s AND tried OPERATOR(pg_catalog.<>) ARRAY[]::text[] RETURNING task_id""")


def forget(executor: Transaction, copy: Copy) -> None:
    """Remove the note that the copy here counts."""
    executor.run(_FORGET, task_id=copy[0], call=copy[1])


def give_way(executor: Transaction, copy: Copy) -> bool:
    """Remove the note that the copy here counts, unless another copy has given way to it; False in that case."""
    return bool(executor.run(_GIVE_WAY, task_id=copy[0], call=copy[1]))


PAGE = 1000
"""Notes removed in one statement; part of its text, like `publishing.CHECK_PAGE`."""

_PRUNE = Statement(f"""
DELETE FROM {{duplicates}} WHERE ctid = ANY(ARRAY(
  SELECT ctid FROM {{duplicates}} WHERE kept_until < now() ORDER BY kept_until LIMIT {PAGE})) RETURNING call""")


def prune(connections: Autocommit) -> int:
    """Remove a page of notes that were kept long enough; returns their number."""
    return len(connections.run(_PRUNE))
