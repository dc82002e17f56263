"""Trees of jobs, from the parents in `jobs`: the jobs below a job, and above it.

Children are found by the index, job by job (LATERAL): if a job has very many children, a join would read all jobs.

Rows of `tree_terminations`: the places of a large tree that its recursive termination has not reached yet. A row says
that the job (`itself`) and everything below it are still to be terminated, or only its children whose names come after
`after` (the empty text: all), with everything below those. `root` is the job whose termination was asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .statement import Reader, Statement, Transaction, arrays, first

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


_BEGIN = Statement("""
INSERT INTO {tree_terminations} (job_id, root, itself)
SELECT i.id, i.id, %(itself)s FROM unnest(%(ids)s::bigint[]) AS i(id)
WHERE %(itself)s OR EXISTS (SELECT FROM {jobs} c WHERE c.parent_id = i.id)
ON CONFLICT (job_id) DO UPDATE SET itself = tree_terminations.itself OR excluded.itself, after = ''
RETURNING root""")


def begin_termination(executor: Transaction, ids: Iterable[int], *, itself: bool) -> set[int]:
    """Begin to terminate everything below these jobs, page by page, and with `itself` the jobs too.

    Returns the roots by which `take_places` finds the pages; nothing for a job without children.
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


def take_places(executor: Transaction, roots: Iterable[int] | None) -> Sequence[Any]:
    """Lock the next rows that are not locked, of these roots or of any; the newest jobs first.

    So the tree is walked depth first rather than breadth first, and there are few rows at any time.
    """
    return executor.run(_TAKE, roots=None if roots is None else list(roots))


_LEFT = Statement("SELECT EXISTS (SELECT FROM {tree_terminations} WHERE root = ANY(%(roots)s::bigint[])) AS is_left")
_WAIT = Statement("""
SELECT job_id FROM {tree_terminations} WHERE root = ANY(%(roots)s::bigint[])
ORDER BY job_id DESC LIMIT 1 FOR UPDATE""")


def wait_for_places(executor: Transaction, roots: Iterable[int]) -> bool:
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


def find_page(executor: Reader, places: Sequence[Any], *, most: int) -> Sequence[Any]:
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
    `split_places`, which waits for it, sees the new row.
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


def remove_places(executor: Transaction, ids: Iterable[int]) -> None:
    """Remove the rows of jobs below which no work remains."""
    executor.run(_REMOVE, ids=list(ids))


_SPLIT = Statement("""
WITH gone AS (
  DELETE FROM {tree_terminations} WHERE job_id = ANY(%(ids)s::bigint[]) RETURNING job_id, root, after)
INSERT INTO {tree_terminations} (job_id, root, itself)
SELECT c.id, gone.root, true FROM gone CROSS JOIN LATERAL (
  SELECT x.id FROM {jobs} x WHERE x.parent_id = gone.job_id AND x.name > gone.after OFFSET 0) c
ON CONFLICT (job_id) DO UPDATE SET itself = true, after = ''""")


def split_places(executor: Transaction, ids: Iterable[int]) -> None:
    """Make rows for the present children of these jobs, to be terminated one by one; later children are not terminated.

    The jobs are locked, and are about to take new children again.
    """
    executor.run(_SPLIT, ids=list(ids))
