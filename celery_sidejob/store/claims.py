"""A run's hold on its job: claim and fence.

A run is claimed by the process that begins it, or in a page by the worker that has its message (`claim_page`).

The in-run marker is `unit_no`, `worker_id` and `run_kind` in `jobs`. Every end clears it, a release too
(`run_ends.py`): a zombie's fence then finds nothing (`run_no` alone would still match after a release).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from .audience import WHO_LISTENS
from .jobs import HANDLE, ROW
from .outbox.arming import DUE, MANAGED
from .outbox.holds import HELD, LIVES
from .packets import CONSUME, those
from .statement import Frequent, Reader, Statement, Transaction, columns, first

_RUN = f"""{ROW}, a.task_id, a.unique_key, j.started, j.terminate_tree, a.options::text AS options, j.failed_by,
  EXISTS (SELECT FROM {{port_waiters}} w WHERE w.job_id = j.id) AS waited_for_room"""
"""The columns of its job and its asking that a run needs."""

_CHILD = (
    f"{HANDLE}, NULL::boolean, NULL::boolean, NULL::text, NULL::bigint{', NULL::boolean' * 5}, NULL::double precision"
    f"{', NULL::boolean' * 2}"
)
"""A child of the job, in the same columns as the job in the result of a claim. Only a child has no `came_late`."""


NAMED = "WITH before AS MATERIALIZED (SELECT b.id, b.wakes FROM {jobs} b WHERE b.id = %(id)s),"
"""The CTE `before` of a claim by name."""
_IN_PAGE = """
WITH seen AS MATERIALIZED (
  SELECT b.id, b.wakes, r.for_run, r.task
  FROM unnest(%(ids)s::bigint[], %(for_runs)s::bigint[], %(tasks)s::text[]) AS r(id, for_run, task)
  CROSS JOIN LATERAL (
    SELECT x.id, x.wakes FROM {jobs} x
    WHERE x.id = r.id AND NOT EXISTS (SELECT FROM {queues} q WHERE q.name = x.queue) OFFSET 0) b),
before AS MATERIALIZED (
  SELECT seen.* FROM seen CROSS JOIN LATERAL (
    SELECT FROM {jobs} x WHERE x.id = seen.id FOR NO KEY UPDATE OF x SKIP LOCKED) free),"""
"""The CTE `before` of a claim of a page: the jobs that no transaction has locked, as the snapshot shows them.

Those of managed queues are not even locked for an instant: a gate would pass over the best of them.
"""


def claiming(changes: str, condition: str, *, before: str = NAMED, then: str = "") -> Statement:
    """Return a statement that claims runs, with the children of its snapshot and the wakes of the same snapshot.

    `before` is each job in the snapshot. The UPDATE may have waited for the job's row and find more wakes there, from
    ends of children that the snapshot does not show. If it takes the run, it leaves those wakes: the job is queued as
    if asked during the run. Of a family with more than `most` children it reads no rows, only that many entries of an
    index.
    """
    return Frequent(f"""
{before}
claimed AS (
  UPDATE {{jobs}} j SET changes = j.changes + 1, {changes}
    wakes_taken = CASE j.status WHEN 'terminating' THEN j.wakes_taken ELSE before.wakes END,
    status = CASE WHEN j.status <> 'terminating' AND j.wakes = before.wakes THEN 'running' ELSE j.status END
  FROM before
  WHERE j.id = before.id AND {condition}
  RETURNING j.*),
held AS (
  UPDATE {{messages}} m SET {HELD}
  FROM claimed WHERE m.job_id = claimed.id
  RETURNING m.job_id, m.losses, extract(epoch FROM now() - m.due_at)::double precision AS waited_s),
past AS (
  DELETE FROM {{timers}} t USING claimed
  WHERE t.job_id = claimed.id AND claimed.status <> 'terminating' AND (t.ask = 'timeout'
    OR t.due_at <= now() AND t.ask IN ('run', 'look', 'force') AND NOT EXISTS (
      SELECT FROM {{timers}} e WHERE e.job_id = t.job_id AND e.id < t.id AND e.ask IN ('terminate', 'terminate_tree'))))
  {then},
family AS MATERIALIZED (
  SELECT id, EXISTS (
      SELECT FROM {{jobs}} c WHERE c.parent_id = claimed.id ORDER BY c.parent_id, c.name OFFSET %(most)s LIMIT 1
    ) AS is_large
  FROM claimed WHERE run_kind = 'run')
SELECT {_RUN}, (SELECT held.losses > 0 FROM held WHERE held.job_id = j.id) AS takes,
  j.status <> 'terminating' AND j.ended_at IS NULL AND EXISTS (
    SELECT FROM {{jobs}} p
    WHERE p.id = j.parent_id AND p.terminate_tree AND p.status IN ('terminating', 'terminated')) AS came_late,
  (SELECT family.is_large FROM family WHERE family.id = j.id) AS has_many_children,
  j.run_kind = 'run' AND j.rate_terminates AND j.rate_opens_at - make_interval(secs => j.rate_interval_s) > now()
    AS is_too_soon,
  (SELECT held.waited_s FROM held WHERE held.job_id = j.id) AS waited_s,
  {WHO_LISTENS}
FROM claimed j LEFT JOIN {{askings}} a ON a.job_id = j.id AND a.closed_at IS NULL
UNION ALL
SELECT c.* FROM family CROSS JOIN LATERAL (
  SELECT {_CHILD} FROM {{jobs}} j WHERE j.parent_id = family.id OFFSET 0) c
WHERE NOT family.is_large""")


TOKEN_TAKEN = """make_interval(secs => {0}.rate_interval_s) + greatest({0}.rate_opens_at,
        now() - make_interval(secs => ({0}.rate_burst - 1)::double precision * {0}.rate_interval_s))"""
"""When the next run may begin after this one, as SQL: the bucket of the rate has one token less."""

BEGINS = f"""run_no = j.run_no + 1, unit_no = 0, worker_id = %(worker_id)s, timer_in_run = false,
    run_kind = CASE j.status WHEN 'queued' THEN 'run' ELSE 'shutdown' END,
    ran_at = CASE WHEN j.status <> 'queued' OR j.rate_terminates AND j.rate_opens_at > now() THEN j.ran_at
      ELSE now() END,
    rate_opens_at = CASE WHEN j.status <> 'queued' THEN j.rate_opens_at
      ELSE {TOKEN_TAKEN.format("j")} END,"""
"""What a claim changes in its job `j`, as SQL."""

_CLAIM = claiming(
    BEGINS,
    f"""j.task = %(task)s AND j.status IN ('queued', 'terminating') AND j.unit_no IS NULL
    AND j.run_no = %(for_run)s::bigint - 1
    AND EXISTS (
      SELECT FROM {{messages}} m WHERE m.job_id = j.id AND m.for_run = %(for_run)s::bigint AND {DUE}
        AND (%(passes)s OR NOT EXISTS ({MANAGED})))
    AND (j.wakes = before.wakes OR %(leaves)s) AND j.blocked IS NOT TRUE
    AND {LIVES}""",
)
_CLAIM_AGAIN = claiming(
    "",
    """j.task = %(task)s AND j.run_no = %(for_run)s::bigint AND j.worker_id = %(worker_id)s AND j.unit_no = 0
    AND EXISTS (SELECT FROM {messages} m WHERE m.job_id = j.id AND m.locked_pid = %(pid)s)""",
)
# A run that has come back from a death is claimed by its own process: then its next death counts. So does the first of
# a job of which no run may be lost.
_CLAIM_PAGE = claiming(
    BEGINS,
    f"""j.task = before.task AND j.status = 'queued' AND j.unit_no IS NULL AND j.run_no = before.for_run - 1
    AND j.losses = 0 AND coalesce(j.max_losses, %(max_losses)s::int) > 1
    AND j.rate_interval_s IS NULL AND j.wakes = before.wakes AND j.blocked IS NOT TRUE
    AND EXISTS (
      SELECT FROM {{messages}} m WHERE m.job_id = j.id AND m.for_run = before.for_run AND {DUE}
        AND m.losses = 0 AND m.pool IS NULL AND NOT EXISTS ({MANAGED}))
    AND {LIVES}""",
    before=_IN_PAGE,
)


class Try(IntEnum):
    """The ways to claim a run, in the order of the tries."""

    AT_ONCE = 0
    """Fails if the job was asked while the claim waited for its row: the next try sees that ask, and takes it."""
    LEAVING = 1
    """Leaves asks that came while this try waited to a further run."""
    AGAIN = 2
    """This same process has claimed the run, lost the answer, and done nothing since."""


class Owed(NamedTuple):
    """A run that a delivery announces."""

    job_id: int
    for_run: int
    task: str


def claim(
    executor: Transaction,
    owed: Owed,
    *,
    worker_id: int,
    most: int,
    how: Try,
    passes: bool = False,
    schema: str | None = None,
) -> Sequence[Any]:
    """Begin a run of a job for this worker; returns the job, then the children of the same snapshot.

    No children if there are more than `most` (`has_many_children`), and none for a shutdown. Returns nothing if the
    delivery is stale, or the job is of another task. `came_late`: the job never came to rest and was not terminated,
    and its parent was terminated recursively before the transaction that made it a child was committed. `is_too_soon`:
    the run is beyond the job's rate, by which the job is to be terminated. `waited_s`: how long it was due. With
    `schema` the job's row also tells `WHO_LISTENS`. A run takes a token of its job's bucket: it moves the moment from
    which the next may begin.

    Every deciding column is in `jobs`: of two claims that waited for each other only one finds its row. The message's
    row may be seen as of the statement's start, which is harmless: it is put off only with `run_no`, or
    when the job is made to depend on others, which its own row says. The
    process's id is recorded for the worker's parent, which rescues the run if this process dies.
    """
    return executor.run(
        _CLAIM_AGAIN if how == Try.AGAIN else _CLAIM,
        id=owed.job_id,
        task=owed.task,
        for_run=owed.for_run,
        worker_id=worker_id,
        pid=os.getpid(),
        most=most,
        leaves=how == Try.LEAVING,
        passes=passes,
        schema=schema,
    )


def claim_page(
    executor: Transaction, owed: Iterable[Owed], *, worker_id: int, max_losses: int, most: int, schema: str | None
) -> Sequence[Any]:
    """Begin runs that nobody has begun yet, before their processes are asked; returns the same rows as `claim`.

    A child follows somewhere behind its parent. A run that is missing is left to its process: it may have begun, a
    transaction has its job locked, it is a shutdown, it has come back from a death or may not (`max_losses` is that of
    jobs without one of their own), or it may have to wait for a rate, a slot or the gate of its queue. Waits for no job
    that somebody has locked.
    """
    return executor.run(
        _CLAIM_PAGE,
        **columns(sorted(owed), "ids", "for_runs", "tasks"),
        worker_id=worker_id,
        pid=None,
        max_losses=max_losses,
        most=most,
        schema=schema,
    )


_READ_CLAIMED = Statement(f"""
SELECT {_RUN} FROM {{jobs}} j LEFT JOIN {{askings}} a ON a.job_id = j.id AND a.closed_at IS NULL WHERE j.id = %(id)s""")


def read_claimed(executor: Reader, job_id: int) -> Any | None:
    """Read the columns that `claim` returned, as they are now: others have changed the job, or its process is gone."""
    return first(executor.run(_READ_CLAIMED, id=job_id))


_FENCE = Frequent(f"""
WITH consumed AS ({CONSUME}),
fenced AS (
  UPDATE {{jobs}} SET unit_no = unit_no + 1, losses = 0, started = true
  WHERE id = %(id)s::bigint AND run_no = %(run_no)s::bigint AND unit_no = %(unit_no)s AND worker_id = %(worker_id)s
  RETURNING id)
SELECT (SELECT count(*) FROM consumed) AS consumed,
  ARRAY(SELECT DISTINCT port_id FROM consumed WHERE limited) AS limited FROM fenced""")


def fence(
    executor: Transaction,
    job_id: int,
    *,
    run_no: int,
    unit_no: int,
    worker_id: int,
    read: Sequence[tuple[int, int]] = (),
) -> Any | None:
    """Pass if the run is still the job's current one and this unit was not applied yet; the job is locked.

    Removes the packets that the unit has `read`. Returns how many of them were still the run's to remove (`consumed`),
    and the ports with a limit of which they were. None if the fence is closed: then the transaction must be rolled
    back.
    """
    return first(executor.run(_FENCE, id=job_id, run_no=run_no, unit_no=unit_no, worker_id=worker_id, **those(read)))


_OUTCOME = Statement("""
SELECT j.task, j.run_no, j.unit_no, j.worker_id, j.ended_run, j.status FROM {jobs} j WHERE j.id = %(id)s""")


def outcome(executor: Reader, job_id: int) -> Any | None:
    """Read the columns that tell whether a commit was applied whose answer was lost."""
    return first(executor.run(_OUTCOME, id=job_id))
