"""Trees of jobs, from the parents in `jobs`: the jobs below a job, and above it.

Children are found by the index, job by job (LATERAL): if a job has very many children, a join would read all jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .statement import Reader, Statement, first

_SUBTREE = Statement("""
WITH RECURSIVE tree AS (
  SELECT id AS root, id, status FROM {jobs} WHERE id = ANY(%(ids)s::bigint[])
  UNION ALL SELECT tree.root, j.id, j.status FROM tree CROSS JOIN LATERAL (
    SELECT c.id, c.status FROM {jobs} c WHERE c.parent_id = tree.id OFFSET 0) j)
SELECT root, id, status FROM tree""")


def subtree(executor: Reader, ids: Iterable[int]) -> Sequence[Any]:
    """Read (root, id, status) of jobs and of everything below them; `root` is the given job that it is below."""
    return executor.run(_SUBTREE, ids=list(ids))


_REST = Statement("""
WITH RECURSIVE tree AS (
  SELECT id, status FROM {jobs} WHERE id = %(id)s
  UNION ALL SELECT j.id, j.status FROM tree CROSS JOIN LATERAL (
    SELECT c.id, c.status FROM {jobs} c WHERE c.parent_id = tree.id OFFSET 0) j)
SELECT EXISTS (SELECT FROM {jobs} WHERE id = %(id)s)
  AND NOT EXISTS (SELECT FROM tree WHERE status <> %(status)s) AS rest""")


def rest(executor: Reader, job_id: int, status: str) -> bool:
    """Tell whether a job and everything below it have this status; False without a job. Stops at another status."""
    return bool(executor.run(_REST, id=job_id, status=str(status))[0].rest)


_LEVELS = Statement("""
WITH RECURSIVE tree AS (
  SELECT id, status, 0 AS level FROM {jobs} WHERE id = %(id)s
  UNION ALL SELECT j.id, j.status, tree.level + 1 FROM tree CROSS JOIN LATERAL (
    SELECT c.id, c.status FROM {jobs} c WHERE c.parent_id = tree.id OFFSET 0) j)
SELECT array_agg(id ORDER BY level) AS ids, bool_and(status = ANY(%(statuses)s::text[])) AS finished FROM tree""")


def levels(executor: Reader, job_id: int, statuses: Collection[str]) -> list[int] | None:
    """Read the ids of a job and of everything below it, each after its ancestors.

    None if one of them has another status than these. Reads the whole tree: a second for a million jobs.
    """
    found = executor.run(_LEVELS, id=job_id, statuses=[str(status) for status in statuses])[0]
    return found.ids if found.finished else None


COUNTED = 10_000
"""Up to this many children of a job are counted; the oldest are found among the first this many by name."""
TOO_MANY = COUNTED + 1
"""The number of children of a job that has more."""

_NODE = f"""j.id, j.parent_id, j.name, j.task, j.status, (
    SELECT count(*) FROM (SELECT FROM {{jobs}} c WHERE c.parent_id = j.id LIMIT {TOO_MANY}) few) AS children"""
_NODE_OF = Statement(f"SELECT {_NODE} FROM {{jobs}} j WHERE j.id = %(id)s")
_NODES_BELOW = Statement(f"""
SELECT {_NODE} FROM (
  SELECT x.* FROM unnest(%(ids)s::bigint[]) AS r(id) CROSS JOIN LATERAL (
    SELECT c.* FROM {{jobs}} c WHERE c.parent_id = r.id ORDER BY c.parent_id, c.name LIMIT {TOO_MANY}) x
  ORDER BY x.parent_id, x.id LIMIT %(limit)s) j ORDER BY j.parent_id, j.id""")


def node(executor: Reader, job_id: int) -> Any | None:
    """Read a job as a tree shows it, with the number of its children, `TOO_MANY` at most."""
    return first(executor.run(_NODE_OF, id=job_id))


def nodes_below(executor: Reader, ids: Iterable[int], *, limit: int) -> Sequence[Any]:
    """Read up to `limit` children of these jobs, each parent's oldest first, as a tree shows them.

    For a job with more than `COUNTED` children, the oldest among the first ones by name.
    """
    return executor.run(_NODES_BELOW, ids=list(ids), limit=limit)


_ANCESTORS = Statement("""
WITH RECURSIVE up AS (
  SELECT id, parent_id, 0 AS level FROM {jobs} WHERE id = %(id)s
  UNION ALL SELECT j.id, j.parent_id, up.level + 1 FROM {jobs} j JOIN up ON j.id = up.parent_id)
SELECT id FROM up ORDER BY level""")


def ancestors(executor: Reader, job_id: int) -> list[int]:
    """Read the ids of a job and of everything above it, the root last."""
    return [row.id for row in executor.run(_ANCESTORS, id=job_id)]
