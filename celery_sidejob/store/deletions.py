"""Deletions: of jobs with all their rows, and of finished jobs that need not be kept any longer.

Rows of `tree_deletions`: the roots of large trees that are being deleted, a part in each transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .room import WAITS
from .statement import Autocommit, Reader, Statement, Transaction
from .trees import SEEN_BY_PARENT

_DELETE = Statement(f"""
WITH noted AS (
  INSERT INTO {{timers}} (job_id, due_at, ask, accepted)
  SELECT DISTINCT w.job_id, now(), 'run', false
  FROM {{port_waiters}} w JOIN {{ports}} p ON p.id = w.port_id JOIN {{jobs}} waiter ON {WAITS}
  WHERE p.job_id = ANY(%(ids)s::bigint[]) AND NOT w.job_id = ANY(%(ids)s::bigint[])),
freed AS (
  UPDATE {{dependencies}} d SET state = 'over'
  FROM (
    SELECT e.job_id, e.depends_on FROM {{dependencies}} e
    WHERE e.depends_on = ANY(%(ids)s::bigint[]) AND NOT e.job_id = ANY(%(ids)s::bigint[])
    ORDER BY e.job_id, e.depends_on FOR UPDATE) these
  WHERE d.job_id = these.job_id AND d.depends_on = these.depends_on),
to_terminate AS (DELETE FROM {{tree_terminations}} WHERE job_id = ANY(%(ids)s::bigint[])),
to_delete AS (DELETE FROM {{tree_deletions}} WHERE job_id = ANY(%(ids)s::bigint[])),
tagged AS (DELETE FROM {{tags}} WHERE job_id = ANY(%(ids)s::bigint[])),
told AS (DELETE FROM {{progress}} WHERE job_id = ANY(%(ids)s::bigint[])),
kept AS (DELETE FROM {{steps}} WHERE job_id = ANY(%(ids)s::bigint[])),
past AS (DELETE FROM {{run_history}} WHERE job_id = ANY(%(ids)s::bigint[])),
logged AS (DELETE FROM {{job_log}} WHERE job_id = ANY(%(ids)s::bigint[])),
gone AS (DELETE FROM {{jobs}} WHERE id = ANY(%(ids)s::bigint[])),
followed AS (DELETE FROM {{tracked}} WHERE job_id = ANY(%(ids)s::bigint[]) RETURNING job_id)
SELECT job_id FROM followed""")


def delete(executor: Transaction, ids: Iterable[int]) -> set[int]:
    """Delete jobs with all their rows, and return those that were tracked.

    The foreign key of children is checked at the statement's end. Jobs that wait for room on a port of these jobs are
    noted to be asked: they will find that the port is gone. Jobs that depend on these no longer wait for them.
    """
    return {row.job_id for row in executor.run(_DELETE, ids=list(ids))}


_UNSETTLED = Statement("""
SELECT m.job_id FROM {messages} m WHERE m.job_id = ANY(%(ids)s::bigint[])
UNION SELECT t.job_id FROM {timers} t WHERE t.job_id = ANY(%(ids)s::bigint[])
UNION SELECT a.job_id FROM {askings} a WHERE a.job_id = ANY(%(ids)s::bigint[]) AND a.stored_at IS NULL""")


def unsettled(executor: Reader, ids: Iterable[int]) -> set[int]:
    """Read which of these jobs are not settled: work is still due for them, or the backend lacks a result."""
    return {row.job_id for row in executor.run(_UNSETTLED, ids=list(ids))}


WINDOW = 10_000
"""Jobs read in one step of pruning."""

_OWN = "(j.retention_s IS NOT NULL OR j.retention_keep IS NOT NULL)"
"""Whether the task of a job `j` has a retention of its own."""

_NEWEST_PAGE = Statement(f"""
WITH page AS MATERIALIZED (
  SELECT id, parent_id, task, status, retention_s, retention_keep FROM {{jobs}} WHERE id < %(before)s
  ORDER BY id DESC LIMIT %(limit)s),
counted AS (
  SELECT CASE WHEN {_OWN} THEN j.task ELSE '' END AS kind, j.id, j.retention_keep AS keep FROM page j
  WHERE j.status IN ('completed', 'terminated')
    AND CASE WHEN {_OWN} THEN j.retention_keep IS NOT NULL ELSE %(all_others)s AND j.parent_id IS NULL END)
SELECT NULL AS kind, (SELECT min(id) FROM page) AS last, (SELECT count(*) FROM page) AS jobs, NULL::bigint AS keep,
  NULL::bigint[] AS ids
UNION ALL
SELECT kind, NULL, NULL, (array_agg(keep ORDER BY id DESC))[1], array_agg(id ORDER BY id DESC) FROM counted
GROUP BY kind""")


def newest_page(
    executor: Reader, *, before: int, all_others: bool
) -> tuple[dict[str, tuple[int | None, list[int]]], int | None]:
    """Read, among the `WINDOW` jobs before the id `before`, finished jobs that are kept by number, grouped by task.

    Returns {task: (how many of its jobs are kept, ids, newest first)}. With `all_others` the jobs without a parent
    whose task has no retention are a group too, under the empty text, without a number. Also returns the lowest id that
    was read, None at the end.
    """
    page, *kinds = executor.run(_NEWEST_PAGE, before=before, limit=WINDOW, all_others=all_others)
    return {row.kind: (row.keep, row.ids) for row in kinds}, page.last if page.jobs == WINDOW else None


_OLD_PAGE = Statement(f"""
WITH page AS MATERIALIZED (
  SELECT id, parent_id, task, status, ended_at, retention_s, retention_keep FROM {{jobs}} WHERE id > %(after)s
  ORDER BY id LIMIT %(limit)s),
surplus AS MATERIALIZED (SELECT * FROM unnest(%(kinds)s::text[], %(surplus)s::bigint[]) AS s(kind, newest))
SELECT (SELECT max(id) FROM page) AS last, (SELECT count(*) FROM page) AS jobs,
  EXISTS (SELECT FROM page WHERE retention_keep IS NOT NULL) AS kept_by_number, ARRAY(
  SELECT j.id FROM page j
  WHERE j.status IN ('completed', 'terminated')
    AND (j.ended_at < now() - make_interval(secs => CASE WHEN {_OWN} THEN j.retention_s ELSE %(age_s)s END)
      OR EXISTS (
        SELECT FROM surplus s WHERE s.kind = CASE WHEN {_OWN} THEN j.task ELSE '' END AND j.id <= s.newest))
    AND (j.parent_id IS NULL OR {_OWN} AND {SEEN_BY_PARENT}
      AND NOT EXISTS (SELECT FROM {{ports}} o JOIN {{packets}} k ON k.port_id = o.id WHERE o.job_id = j.id))
  ORDER BY j.id) AS ids""")


def old_page(executor: Reader, *, after: int, age_s: float | None, surplus: Mapping[str, int]) -> Any:
    """Read, among the next `WINDOW` jobs, the `ids` of finished jobs that need not be kept any longer.

    Also returns `last`, the last id that was read, None at the end, and whether the task of one of the jobs keeps a
    number of them (`kept_by_number`).

    A job is kept for its task's retention, or else for `age_s` (None: for ever), and while a job above it keeps it. It
    is not kept if it is not among the newest of its group: `surplus` is the newest id that may be removed, by the
    groups of `newest_page`. A parent keeps its children, unless the child's own task has a retention and the parent has
    run since and rests (`SEEN_BY_PARENT`). It also keeps a child as long as packets wait on the child's ports.
    """
    kinds, newest = list(surplus), list(surplus.values())
    page = executor.run(_OLD_PAGE, after=after, limit=WINDOW, age_s=age_s, kinds=kinds, surplus=newest)[0]
    return page._replace(last=page.last if page.jobs == WINDOW else None)


_BEGIN_TREE = Statement("INSERT INTO {tree_deletions} (job_id) VALUES (%(id)s) ON CONFLICT (job_id) DO NOTHING")


def begin_tree(executor: Transaction, job_id: int) -> None:
    """Begin to delete a job with all jobs below it; the job is locked exclusively. The row is deleted with the job."""
    executor.run(_BEGIN_TREE, id=job_id)


_TREES_AMONG = Statement("SELECT job_id FROM {tree_deletions} WHERE job_id = ANY(%(ids)s::bigint[])")


def trees_among(executor: Reader, ids: Iterable[int]) -> set[int]:
    """Read which of these jobs are roots of trees that are being deleted."""
    return {row.job_id for row in executor.run(_TREES_AMONG, ids=list(ids))}


_TREES = Statement("SELECT job_id FROM {tree_deletions} WHERE job_id > %(after)s ORDER BY job_id LIMIT %(limit)s")


def trees(executor: Autocommit, *, after: int, limit: int) -> list[int]:
    """Read the next roots of trees that are being deleted, in the order of their ids."""
    return [row.job_id for row in executor.run(_TREES, after=after, limit=limit)]
