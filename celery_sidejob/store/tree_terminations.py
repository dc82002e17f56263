"""Rows of `tree_terminations`: the parts of a large tree that its recursive termination has not reached yet.

A row says that the job (`itself`) and everything below it are still to be terminated, or only its children whose names
come after `after` (the empty text: all), with everything below those. `root` is the job whose termination was asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .statement import Reader, Statement, Transaction, arrays

_BEGIN = Statement("""
INSERT INTO {tree_terminations} (job_id, root, itself)
SELECT i.id, i.id, %(itself)s FROM unnest(%(ids)s::bigint[]) AS i(id)
WHERE %(itself)s OR EXISTS (SELECT FROM {jobs} c WHERE c.parent_id = i.id)
ON CONFLICT (job_id) DO UPDATE SET itself = tree_terminations.itself OR excluded.itself, after = ''
RETURNING root""")


def begin(executor: Transaction, ids: Iterable[int], *, itself: bool) -> set[int]:
    """Begin to terminate everything below these jobs, page by page, and with `itself` the jobs too.

    Returns the roots by which `take` finds the pages; nothing for a job without children.
    """
    return {row.root for row in executor.run(_BEGIN, ids=sorted(set(ids)), itself=itself)}


_HAND_DOWN = Statement("""
INSERT INTO {tree_terminations} (job_id, root, itself)
SELECT c.id, %(id)s, true FROM {jobs} c
WHERE c.parent_id = %(id)s AND NOT (c.terminate_tree AND c.status IN ('terminating', 'terminated'))
  AND NOT EXISTS (SELECT FROM {tree_terminations} t WHERE t.job_id = %(id)s)
ON CONFLICT (job_id) DO NOTHING
RETURNING root""")


def hand_down(executor: Transaction, job_id: int) -> set[int]:
    """Begin to terminate the children that the job's recursive termination has not reached, with all jobs below them.

    There are none while pages are still to be terminated below the job: these will reach all its children. Returns the
    job as the root of these terminations, or nothing.
    """
    return {row.root for row in executor.run(_HAND_DOWN, id=job_id)}


PLACES = 200
"""The most rows from which a page begins."""

_TAKE = Statement(f"""
SELECT job_id, root, itself, after FROM {{tree_terminations}}
WHERE %(roots)s::bigint[] IS NULL OR root = ANY(%(roots)s::bigint[])
ORDER BY job_id DESC LIMIT {PLACES} FOR UPDATE SKIP LOCKED""")


def take(executor: Transaction, roots: Iterable[int] | None) -> Sequence[Any]:
    """Lock the next rows that are not locked, of these roots or of any; the newest jobs first.

    So the tree is walked depth first rather than breadth first, and there are few rows at any time.
    """
    return executor.run(_TAKE, roots=None if roots is None else list(roots))


_LEFT = Statement("SELECT EXISTS (SELECT FROM {tree_terminations} WHERE root = ANY(%(roots)s::bigint[])) AS is_left")
_WAIT = Statement("""
SELECT job_id FROM {tree_terminations} WHERE root = ANY(%(roots)s::bigint[])
ORDER BY job_id DESC LIMIT 1 FOR UPDATE""")


def wait(executor: Transaction, roots: Iterable[int]) -> bool:
    """Wait for the transaction that works on the first row of these roots; False if they have no row."""
    given = list(roots)
    is_left = bool(executor.run(_LEFT, roots=given)[0].is_left)
    if is_left:
        executor.run(_WAIT, roots=given)
    return is_left


_FIND = Statement("""
WITH RECURSIVE place AS (
  SELECT * FROM unnest(%(job_id)s::bigint[], %(root)s::bigint[], %(itself)s::boolean[], %(after)s::text[])
    AS p(job_id, root, itself, after)),
tree AS (
  SELECT f.* FROM place CROSS JOIN LATERAL (
    SELECT place.root, j.id, NULL::bigint AS parent_id, NULL AS name FROM {jobs} j
    WHERE place.itself AND j.id = place.job_id
    UNION ALL
    (SELECT place.root, c.id, c.parent_id, c.name FROM {jobs} c
     WHERE NOT place.itself AND c.parent_id = place.job_id AND c.name > place.after
     ORDER BY c.parent_id, c.name LIMIT %(most)s::bigint)) f
  UNION ALL
  SELECT tree.root, j.* FROM tree CROSS JOIN LATERAL (
    SELECT c.id, c.parent_id, c.name FROM {jobs} c WHERE c.parent_id = tree.id
    ORDER BY c.parent_id, c.name LIMIT %(most)s::bigint) j)
SELECT root, id, parent_id, name FROM tree LIMIT %(most)s::bigint""")


def find(executor: Reader, places: Sequence[Any], *, most: int) -> Sequence[Any]:
    """Read the next `most` jobs of trees from these rows on: (root, id, parent_id, name), each parent's by name.

    A job whose row has `itself` has no parent here.
    """
    return executor.run(_FIND, **arrays(places, "job_id", "root", "itself", "after"), most=most)


_GO_ON = Statement("""
WITH seen AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::bigint[], %(roots)s::bigint[], %(first)s::text[], %(last)s::text[])
    AS s(id, root, first, last))
INSERT INTO {tree_terminations} (job_id, root, itself, after)
SELECT seen.id, seen.root, false, seen.last FROM seen
WHERE EXISTS (
  SELECT FROM {jobs} c WHERE c.parent_id = seen.id AND c.name > seen.last
  ORDER BY c.parent_id, c.name LIMIT 1)
UNION ALL
SELECT c.id, seen.root, true, '' FROM seen CROSS JOIN LATERAL (
  SELECT x.id FROM {jobs} x
  WHERE x.parent_id = seen.id AND x.name <= seen.last AND x.name > seen.first OFFSET 0) c
WHERE NOT EXISTS (SELECT FROM seen other WHERE other.id = c.id)
ON CONFLICT (job_id) DO UPDATE SET
  itself = excluded.itself OR tree_terminations.itself AND NOT tree_terminations.job_id = ANY(%(places)s::bigint[]),
  after = CASE WHEN NOT excluded.itself AND tree_terminations.job_id = ANY(%(places)s::bigint[]) THEN excluded.after
    ELSE '' END
RETURNING job_id""")


def go_on(
    executor: Transaction,
    seen: Mapping[int, int],
    *,
    first: Mapping[int, str],
    last: Mapping[int, str],
    places: Sequence[int],
) -> set[int]:
    """Record the work that remains after a page, and return the jobs with a row.

    `seen` are the jobs that were locked and the jobs of the rows `places` from which the page has begun, with their
    roots. For each of them, the children with names after `last` remain. So do children with earlier names, after
    `first`, that were added after the page was read or could not be locked. A row of `places` is updated, so that
    `split`, which waits for it, sees the new row.
    """
    found = executor.run(
        _GO_ON,
        ids=list(seen),
        roots=list(seen.values()),
        first=[first.get(job_id, "") for job_id in seen],
        last=[last.get(job_id, "") for job_id in seen],
        places=list(places),
    )
    return {row.job_id for row in found}


_REMOVE = Statement("DELETE FROM {tree_terminations} WHERE job_id = ANY(%(ids)s::bigint[])")


def remove(executor: Transaction, ids: Iterable[int]) -> None:
    """Remove the rows of jobs below which no work remains."""
    executor.run(_REMOVE, ids=list(ids))


_SPLIT = Statement("""
WITH gone AS (
  DELETE FROM {tree_terminations} WHERE job_id = ANY(%(ids)s::bigint[]) RETURNING job_id, root, after)
INSERT INTO {tree_terminations} (job_id, root, itself)
SELECT c.id, gone.root, true FROM gone CROSS JOIN LATERAL (
  SELECT x.id FROM {jobs} x WHERE x.parent_id = gone.job_id AND x.name > gone.after OFFSET 0) c
ON CONFLICT (job_id) DO UPDATE SET itself = true, after = ''""")


def split(executor: Transaction, ids: Iterable[int]) -> None:
    """Make rows for the present children of these jobs, to be terminated one by one; later children are not terminated.

    The jobs are locked, and are about to take new children again.
    """
    executor.run(_SPLIT, ids=list(ids))
