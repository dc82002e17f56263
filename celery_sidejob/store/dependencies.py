"""Rows of `dependencies`: the jobs that a job waits for, each with the effect of its failure.

An edge leads from a job to a dependency. It is `new` until a check of its job has confirmed it (`kept`). It is `over`
once the job need not wait for it, and `failed` if the job must fail for it. The end or the deletion of a dependency
only marks its edges; a mark means that the job must be checked. Only that check, or the end of its own job, removes an
edge. The model is `tests/protocol_model/dependencies.py`.

Statements that lock several edges do so in the order of (job, dependency).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..model.status import Gate
from . import advisory
from .jobs import HANDLE
from .outbox.arming import OPENS_AT, UNCHECKED, armed
from .statement import Reader, Statement, Transaction, columns, first

LOCK_CLASS = 0x53_4A_44_50 - 0x40_00_00_00
"""The first half of the advisory lock's key ("SJDP", made to fit as `workers.LOCK_CLASS` is)."""


def take_turn(executor: Transaction) -> None:
    """Wait until no other transaction makes an existing job depend on others: only that can close a circle."""
    advisory.take(executor, LOCK_CLASS, [advisory.ONE])


_OPEN = Statement("SELECT id FROM {jobs} WHERE id = ANY(%(ids)s::bigint[]) AND status <> 'completed'")


def open_of(executor: Reader, ids: Iterable[int]) -> set[int]:
    """Return which of these jobs exist and have not completed.

    Nothing is locked: the check of the new edge finds a job that completes or is deleted meanwhile.
    """
    return {row.id for row in executor.run(_OPEN, ids=list(ids))}


_ADD = Statement("""
INSERT INTO {dependencies} (job_id, depends_on, on_failure)
SELECT e.job_id, e.depends_on, e.on_failure
FROM unnest(%(jobs)s::bigint[], %(depend_on)s::bigint[], %(on_failure)s::text[]) AS e(job_id, depends_on, on_failure)
ORDER BY e.job_id, e.depends_on
ON CONFLICT (job_id, depends_on) DO UPDATE SET on_failure = excluded.on_failure, state = 'new'""")


def add(executor: Transaction, edges: Iterable[tuple[int, int, str]]) -> None:
    """Write new edges: (job, the job that it depends on, the effect of that job's failure)."""
    executor.run(_ADD, **columns(list(edges), "jobs", "depend_on", "on_failure"))


_BLOCK = Statement(f"""
WITH held AS (UPDATE {{jobs}} SET blocked = true WHERE id = %(id)s)
UPDATE {{messages}} SET gate = {Gate.JOBS}, next_check_at = {UNCHECKED}, published_at = NULL, suspected_at = now(),
  pool_shard = NULL
WHERE job_id = %(id)s AND locked_by IS NULL""")


def block(executor: Transaction, job_id: int) -> None:
    """Make the first run of a locked job wait, even if its message is published: no claim takes it any more.

    It holds no slot of its pool meanwhile: its dependencies may need the slot.
    """
    executor.run(_BLOCK, id=job_id)


_REACHED = Statement("""
WITH RECURSIVE reached AS (
  SELECT d.job_id, d.depends_on FROM {dependencies} d
  WHERE d.job_id = ANY(%(ids)s::bigint[]) AND d.state IN ('new', 'kept')
  UNION
  SELECT d.job_id, d.depends_on FROM reached r JOIN {dependencies} d ON d.job_id = r.depends_on
  WHERE d.state IN ('new', 'kept'))
SELECT job_id, depends_on FROM reached""")


def reached(executor: Reader, ids: Iterable[int]) -> Sequence[Any]:
    """Read the open edges (job_id, depends_on) of these jobs, and of all jobs that they reach."""
    return executor.run(_REACHED, ids=list(ids))


_UNDEPEND = Statement("""
WITH these AS MATERIALIZED (
  SELECT job_id, depends_on FROM {dependencies}
  WHERE job_id = %(id)s::bigint AND (%(all)s OR depends_on = ANY(%(depend_on)s::bigint[]))
  ORDER BY job_id, depends_on FOR UPDATE),
forgiven AS (
  UPDATE {jobs} SET failed_by = NULL WHERE id = %(id)s::bigint AND %(all)s AND failed_by IS NOT NULL)
UPDATE {dependencies} d SET state = 'over' FROM these
WHERE d.job_id = these.job_id AND d.depends_on = these.depends_on""")


def undepend(executor: Transaction, job_id: int, depend_on: Sequence[int] | None) -> None:
    """Mark edges of a locked job as over: those to these jobs, or all.

    The job then does not fail for failed jobs among them. But the decision that its run fails removes all its edges, so
    it is unknown which jobs it would still wait for. Without `depend_on` it waits for no job, and the decision is taken
    back.
    """
    executor.run(_UNDEPEND, id=job_id, all=depend_on is None, depend_on=list(depend_on or ()))


_ENDED = Statement("""
WITH these AS MATERIALIZED (
  SELECT job_id, depends_on, on_failure FROM {dependencies}
  WHERE depends_on = %(id)s::bigint AND state IN ('new', 'kept') AND (%(completed)s OR on_failure <> 'wait')
  ORDER BY job_id, depends_on FOR UPDATE)
UPDATE {dependencies} d SET state = CASE WHEN %(completed)s OR these.on_failure = 'run' THEN 'over' ELSE 'failed' END
FROM these WHERE d.job_id = these.job_id AND d.depends_on = these.depends_on RETURNING d.job_id""")


def ended(executor: Transaction, job_id: int, *, completed: bool) -> set[int]:
    """Mark the edges to a locked job which now rests; return the jobs that depend on it.

    The job's row has said in this transaction that there are such edges, so the statement sees all that are confirmed.
    """
    return {row.job_id for row in executor.run(_ENDED, id=job_id, completed=completed)}


TOGETHER = 500
"""The most new edges that one check confirms."""

_UNCONFIRMED = Statement(f"""
SELECT depends_on FROM {{dependencies}} WHERE job_id = %(id)s AND state = 'new'
ORDER BY depends_on LIMIT {TOGETHER}""")


def unconfirmed(executor: Reader, job_id: int) -> list[int]:
    """Read the jobs to which the new edges of a job lead: `TOGETHER` at most."""
    return [row.depends_on for row in executor.run(_UNCONFIRMED, id=job_id)]


_NOTED_EDGES = Statement("""
SELECT d.depends_on, d.on_failure, d.state, j.status FROM {dependencies} d LEFT JOIN {jobs} j ON j.id = d.depends_on
WHERE d.job_id = %(id)s AND d.state <> 'kept'
UNION ALL (
  SELECT k.depends_on, k.on_failure, k.state, NULL FROM {dependencies} k
  WHERE k.job_id = %(id)s AND k.state = 'kept' ORDER BY k.job_id, k.depends_on LIMIT 1)""")


def noted_edges(executor: Reader, job_id: int) -> Sequence[Any]:
    """Read the edges of a job that must be checked, and one confirmed edge, if there is any.

    Returns (depends_on, on_failure, state, status); the status of a new edge is None if the job it leads to is gone.
    Confirmed edges are not all read: a job that waits for thousands of jobs is checked as often.
    """
    return executor.run(_NOTED_EDGES, id=job_id)


_SETTLE = Statement("""
WITH gone AS (
  DELETE FROM {dependencies} WHERE job_id = %(id)s AND depends_on = ANY(%(over)s::bigint[])),
confirmed AS (
  UPDATE {dependencies} SET state = 'kept'
  WHERE job_id = %(id)s AND depends_on = ANY(%(confirmed)s::bigint[]) AND state = 'new')
UPDATE {jobs} SET has_dependents = true WHERE id = ANY(%(confirmed)s::bigint[]) AND has_dependents IS NULL""")


def settle(executor: Transaction, job_id: int, *, over: Sequence[int], confirmed: Sequence[int]) -> None:
    """Remove the edges to the jobs `over`, and confirm the edges to the jobs `confirmed`, which are locked and note it.

    Only edges that were read under the lock are named here: an edge that was marked since then is for the next check.
    """
    executor.run(_SETTLE, id=job_id, over=list(over), confirmed=list(confirmed))


_FREE = Statement(
    """
WITH freed AS (
  UPDATE {jobs} SET blocked = NULL, failed_by = coalesce(%(failed_by)s::bigint, failed_by)
  WHERE id = %(id)s AND blocked
  RETURNING id, task, status, unit_no, run_no, queue, priority, limit_key, rate_terminates, rate_opens_at, pool,
    pool_weight, pool_runs),
gone AS (DELETE FROM {dependencies} WHERE job_id = %(id)s AND %(failed_by)s::bigint IS NOT NULL),"""
    + armed(
        "freed j JOIN {messages} held ON held.job_id = j.id",
        task_id="held.task_id",
        opens_at=OPENS_AT,
        cut_short=f"m.gate = {Gate.JOBS}",
        blocked="false",
    )
    + """
SELECT freed.*, armed.task_id, armed.for_run, a.options::text AS options
FROM freed LEFT JOIN armed ON armed.job_id = freed.id LEFT JOIN {askings} a ON a.task_id = armed.task_id"""
)


def free(executor: Transaction, job_id: int, *, check_interval_s: float, failed_by: int | None = None) -> Any | None:
    """Let the first run of a locked job no longer wait for other jobs; None if it does not wait.

    A message that waits for nothing else is armed; a job with a timer has none yet. With `failed_by`, the job for which
    the run fails, all edges are removed. If other edges were added since then, the run still fails for that job.
    """
    return first(executor.run(_FREE, id=job_id, failed_by=failed_by, check_interval_s=check_interval_s))


_ON = Statement(f"""
SELECT {HANDLE} FROM {{dependencies}} d JOIN {{jobs}} j ON j.id = d.depends_on
WHERE d.job_id = %(id)s AND d.state IN ('new', 'kept') ORDER BY d.job_id, d.depends_on LIMIT %(limit)s""")
_BY = Statement(f"""
SELECT {HANDLE} FROM {{dependencies}} d JOIN {{jobs}} j ON j.id = d.job_id
WHERE d.depends_on = %(id)s AND d.state IN ('new', 'kept') ORDER BY d.depends_on, d.job_id LIMIT %(limit)s""")


def dependencies_of(executor: Reader, job_id: int, *, limit: int | None = None) -> Sequence[Any]:
    """Read the jobs for which a job waits, as handles show them, oldest first."""
    return executor.run(_ON, id=job_id, limit=limit)


def dependents_of(executor: Reader, job_id: int, *, limit: int | None = None) -> Sequence[Any]:
    """Read the jobs that wait for a job, as handles show them, oldest first."""
    return executor.run(_BY, id=job_id, limit=limit)


_AROUND = Statement("""
WITH RECURSIVE up AS (
  SELECT d.job_id, d.depends_on FROM unnest(%(ids)s::bigint[]) AS i(id) CROSS JOIN LATERAL (
    SELECT e.job_id, e.depends_on FROM {dependencies} e WHERE e.job_id = i.id AND e.state IN ('new', 'kept') OFFSET 0) d
  UNION SELECT d.job_id, d.depends_on FROM up CROSS JOIN LATERAL (
    SELECT e.job_id, e.depends_on FROM {dependencies} e
    WHERE e.job_id = up.depends_on AND e.state IN ('new', 'kept') OFFSET 0) d),
down AS (
  SELECT d.job_id, d.depends_on FROM unnest(%(ids)s::bigint[]) AS i(id) CROSS JOIN LATERAL (
    SELECT e.job_id, e.depends_on FROM {dependencies} e
    WHERE e.depends_on = i.id AND e.state IN ('new', 'kept') OFFSET 0) d
  UNION SELECT d.job_id, d.depends_on FROM down CROSS JOIN LATERAL (
    SELECT e.job_id, e.depends_on FROM {dependencies} e
    WHERE e.depends_on = down.job_id AND e.state IN ('new', 'kept') OFFSET 0) d)
(SELECT job_id, depends_on FROM up LIMIT %(limit)s) UNION (SELECT job_id, depends_on FROM down LIMIT %(limit)s)""")


def around(executor: Reader, ids: Iterable[int], *, limit: int) -> Sequence[Any]:
    """Read open edges (job_id, depends_on) of these jobs, and of all jobs that they wait for or that wait for them.

    The nearest edges are found first; the search stops at `limit` edges in each direction.
    """
    return executor.run(_AROUND, ids=list(ids), limit=limit)


_OUTSIDE = Statement("""
SELECT d.depends_on, d.job_id FROM {dependencies} d
WHERE d.depends_on = ANY(%(ids)s::bigint[]) AND d.state IN ('new', 'kept') AND NOT d.job_id = ANY(%(ids)s::bigint[])
ORDER BY d.depends_on, d.job_id""")


def outside(executor: Reader, ids: Iterable[int]) -> Mapping[int, list[int]]:
    """Read which other jobs wait for these: {job waited for: the jobs that wait for it}."""
    found: dict[int, list[int]] = {}
    for row in executor.run(_OUTSIDE, ids=list(ids)):
        found.setdefault(row.depends_on, []).append(row.job_id)
    return found


NOTED = "SELECT d.job_id FROM {dependencies} d WHERE d.state <> 'kept'"
"""The jobs that must be checked, as SQL; the index contains only these."""
