"""Trees of jobs, from the parents in `jobs`: the jobs below a job, and above it.

Children are found by the index, job by job (LATERAL): if a job has very many children, a join would read all jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .statement import Reader, Statement, first

SEEN_BY_PARENT = """EXISTS (
        SELECT FROM {jobs} p WHERE p.id = j.parent_id AND p.status IN ('suspended', 'completed', 'failed')
          AND p.ran_at > j.ended_at AND (p.has_steps IS NOT TRUE OR (
            SELECT s.id FROM {steps} s
            WHERE s.job_id = p.id AND NOT s.done AND s.kind IN ('call', 'calls') LIMIT 1) IS NULL))"""
"""Whether the parent of a job `j` has run since the job ended, rests, and waits in no step for children's values.

A sub-select rather than NOT EXISTS, which Postgres may compute from a hash of all steps.
"""

_BELOW = """
WITH RECURSIVE tree AS (
  SELECT id, status, id AS root, 0 AS level FROM {jobs} WHERE id = ANY(%(ids)s::bigint[])
  UNION ALL SELECT j.id, j.status, tree.root, tree.level + 1 FROM tree CROSS JOIN LATERAL (
    SELECT c.id, c.status FROM {jobs} c WHERE c.parent_id = tree.id OFFSET 0) j)"""
"""`tree`: jobs and everything below them, each with the given job above it, and the distance."""

_SUBTREE = Statement(f"{_BELOW} SELECT root, id, status FROM tree LIMIT %(most)s")


def subtree(executor: Reader, ids: Iterable[int], *, most: int | None = None) -> Sequence[Any]:
    """Read (root, id, status) of jobs and of everything below them; `root` is the given job above each.

    The search stops at `most` rows.
    """
    return executor.run(_SUBTREE, ids=list(ids), most=most)


_REST = Statement(f"""{_BELOW}
SELECT EXISTS (SELECT FROM {{jobs}} WHERE id = ANY(%(ids)s::bigint[]))
  AND NOT EXISTS (SELECT FROM tree WHERE status <> %(status)s) AS rest""")


def rest(executor: Reader, job_id: int, status: str) -> bool:
    """Tell whether a job and everything below it have this status; False without a job. Stops at another status."""
    return bool(executor.run(_REST, ids=[job_id], status=str(status))[0].rest)


_OTHER = Statement(f"{_BELOW} SELECT id, status FROM tree WHERE status <> %(status)s LIMIT 1")


def other(executor: Reader, job_id: int, status: str) -> Any | None:
    """Read (id, status) of a job with another status than this, among a job and everything below it; stops there."""
    return first(executor.run(_OTHER, ids=[job_id], status=str(status)))


_LEVELS = Statement(f"""{_BELOW}
SELECT array_agg(id ORDER BY level) AS ids, bool_and(status = ANY(%(statuses)s::text[])) AS finished FROM tree""")


def levels(executor: Reader, job_id: int, statuses: Collection[str]) -> list[int] | None:
    """Read the ids of a job and of everything below it, each after its ancestors.

    None if any has another status than these. Reads the whole tree: a second for a million jobs.
    """
    found = executor.run(_LEVELS, ids=[job_id], statuses=[str(status) for status in statuses])[0]
    return found.ids if found.finished else None


_FAILED = Statement(f"{_BELOW} SELECT id FROM tree WHERE status = 'failed'")


def failed(executor: Reader, job_id: int) -> list[int]:
    """Read the ids of the failed jobs among a job and everything below it."""
    return [row.id for row in executor.run(_FAILED, ids=[job_id])]


_DUE = Statement(f"""{_BELOW}
SELECT EXISTS (
    SELECT FROM tree CROSS JOIN LATERAL (SELECT FROM {{messages}} m WHERE m.job_id = tree.id OFFSET 0) m)
  OR EXISTS (SELECT FROM tree CROSS JOIN LATERAL (SELECT FROM {{timers}} t WHERE t.job_id = tree.id OFFSET 0) t)
  AS due""")


def due(executor: Reader, job_id: int) -> bool:
    """Tell whether any work is due, now or later, for a job or for anything below it."""
    return bool(executor.run(_DUE, ids=[job_id])[0].due)


COUNTED = 10_000
"""The most children of a job that are counted; the oldest are found among the first this many by name."""
TOO_MANY = COUNTED + 1
"""Stands for the number of children of a job that has more."""

_TREE = Statement(f"""
WITH RECURSIVE tree AS (
  SELECT id, parent_id, name, task, status, 0 AS depth FROM {{jobs}} WHERE id = %(id)s
  UNION ALL SELECT j.*, tree.depth + 1 FROM tree CROSS JOIN LATERAL (
    SELECT x.* FROM (
      SELECT c.id, c.parent_id, c.name, c.task, c.status FROM {{jobs}} c WHERE c.parent_id = tree.id
      ORDER BY c.parent_id, c.name LIMIT {TOO_MANY}) x
    ORDER BY x.id LIMIT %(limit)s) j
  WHERE tree.depth < %(depth)s)
SELECT t.*, (SELECT count(*) FROM (SELECT FROM {{jobs}} c WHERE c.parent_id = t.id LIMIT %(counted)s) few) AS children
FROM (SELECT * FROM tree LIMIT %(limit)s) t ORDER BY t.depth, t.parent_id, t.id""")


def tree(executor: Reader, job_id: int, *, depth: int, limit: int, counted: int = TOO_MANY) -> Sequence[Any]:
    """Read up to `limit` jobs of a tree, level by level, each with the number of its children, `counted` at most.

    The search stops at the limit. Each job's oldest children come first; for a job with more than `COUNTED` children,
    the oldest among the first by name.
    """
    return executor.run(_TREE, id=job_id, depth=depth, limit=limit, counted=counted)


_BEYOND = Statement("""
SELECT i.id, (SELECT count(*) FROM (
  SELECT FROM {jobs} c WHERE c.parent_id = i.id OFFSET i.known LIMIT %(most)s) more) AS children
FROM unnest(%(ids)s::bigint[], %(known)s::bigint[]) AS i(id, known)""")


def children_beyond(executor: Reader, known: Mapping[int, int], *, most: int) -> dict[int, int]:
    """Count how many children jobs have beyond a known number, {job: number}; `most` at most."""
    found = executor.run(_BEYOND, ids=list(known), known=list(known.values()), most=most)
    return {row.id: row.children for row in found if row.children}


_ANCESTORS = Statement("""
WITH RECURSIVE up AS (
  SELECT id, parent_id, 0 AS level FROM {jobs} WHERE id = %(id)s
  UNION ALL SELECT j.id, j.parent_id, up.level + 1 FROM {jobs} j JOIN up ON j.id = up.parent_id)
SELECT id FROM (SELECT id, level FROM up LIMIT %(limit)s) found ORDER BY level""")


def ancestors(executor: Reader, job_id: int, *, limit: int | None = None) -> list[int]:
    """Read the ids of a job and of every job above it, the root last; the nearest ones, if there is a limit."""
    return [row.id for row in executor.run(_ANCESTORS, id=job_id, limit=limit)]


_NODES = Statement("""
SELECT id, parent_id, name, task, status FROM {jobs} WHERE id = ANY(%(ids)s::bigint[]) ORDER BY id""")


def nodes(executor: Reader, ids: Iterable[int]) -> Sequence[Any]:
    """Read (id, parent_id, name, task, status) of these jobs."""
    return executor.run(_NODES, ids=list(ids))
