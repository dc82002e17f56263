"""A run's hold on its job: claim, fence, end, and the release of runs of a dead or stopping worker.

A run is claimed by the process that begins it, or in a page by the worker that has its message (`claim_page`). The
worker also writes ends in pages (`end_page`).

The in-run marker is `unit_no`, `worker_id` and `run_kind` in `jobs`. Every end clears it, a release too: a zombie's
fence then finds nothing (`run_no` alone would still match after a release).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from .audience import WHO_LISTENS
from .history import ENDED
from .jobs import HANDLE, ROW
from .outbox.arming import DUE, MANAGED
from .outbox.holds import HELD, LIVES
from .packets import CONSUME, those
from .results import GIVEN, LISTENED, TOLD, Ended, Kept, columns, given, kept, kept_briefly, results_of, told
from .statement import Reader, Statement, Transaction, first

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
    return Statement(
        f"""
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
WHERE NOT family.is_large""",
        frequent=True,
    )


BEGINS = """run_no = j.run_no + 1, unit_no = 0, worker_id = %(worker_id)s, timer_in_run = false,
    run_kind = CASE j.status WHEN 'queued' THEN 'run' ELSE 'shutdown' END,
    ran_at = CASE WHEN j.status <> 'queued' OR j.rate_terminates AND j.rate_opens_at > now() THEN j.ran_at
      ELSE now() END,
    rate_opens_at = CASE WHEN j.status <> 'queued' THEN j.rate_opens_at
      ELSE make_interval(secs => j.rate_interval_s) + greatest(j.rate_opens_at,
        now() - make_interval(secs => (j.rate_burst - 1)::double precision * j.rate_interval_s)) END,"""
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


def claim(
    executor: Transaction,
    job_id: int,
    *,
    task: str,
    for_run: int,
    worker_id: int,
    most: int,
    how: Try,
    passes: bool = False,
    schema: str | None = None,
) -> Sequence[Any]:
    """Begin run `for_run` of the job for this worker; returns the job, then the children of the same snapshot.

    No children if there are more than `most` (`has_many_children`), and none for a shutdown. Returns nothing if the
    delivery is stale, or the job is of another `task`. `came_late`: the job never came to rest and was not terminated,
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
        id=job_id,
        task=task,
        for_run=for_run,
        worker_id=worker_id,
        pid=os.getpid(),
        most=most,
        leaves=how == Try.LEAVING,
        passes=passes,
        schema=schema,
    )


class Owed(NamedTuple):
    """A run that a delivery announces."""

    job_id: int
    for_run: int
    task: str


def claim_page(
    executor: Transaction, owed: Iterable[Owed], *, worker_id: int, max_losses: int, most: int, schema: str | None
) -> Sequence[Any]:
    """Begin runs that nobody has begun yet, before their processes are asked; returns the same rows as `claim`.

    A child follows somewhere behind its parent. A run that is missing is left to its process: it may have begun, a
    transaction has its job locked, it is a shutdown, it has come back from a death or may not (`max_losses` is that of
    jobs without one of their own), or it may have to wait for a rate, a slot or the gate of its queue. Waits for no job
    that somebody has locked.
    """
    ids, for_runs, tasks = ([*column] for column in zip(*sorted(owed), strict=True))
    return executor.run(
        _CLAIM_PAGE,
        ids=ids,
        for_runs=for_runs,
        tasks=tasks,
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


_FENCE = Statement(
    f"""
WITH consumed AS ({CONSUME}),
fenced AS (
  UPDATE {{jobs}} SET unit_no = unit_no + 1, losses = 0, started = true
  WHERE id = %(id)s::bigint AND run_no = %(run_no)s::bigint AND unit_no = %(unit_no)s AND worker_id = %(worker_id)s
  RETURNING id)
SELECT (SELECT count(*) FROM consumed) AS consumed,
  ARRAY(SELECT DISTINCT port_id FROM consumed WHERE limited) AS limited FROM fenced""",
    frequent=True,
)


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


Past = dict[str, Any]
"""What the history keeps of a run's end: `how` it ended, its `kind`, `detail` (JSON text); `history`: of how many."""

NO_PAST: Past = {"how": "", "kind": "run", "detail": None, "history": 0}


_NAMED_RUN = f"""
  SELECT %(id)s::bigint AS job_id, %(run_no)s::bigint AS of_run, %(result)s::json AS result, g.* FROM ({GIVEN}) g"""
"""The run that is to end, with its result as the asking keeps it, and as Celery's, if the statement keeps that."""
_RUNS_OF_PAGE = """
  SELECT r.job_id, r.of_run, r.result::json AS result, r.key, r.state, r.body, r.expires_s
  FROM unnest(%(ids)s::bigint[], %(run_nos)s::bigint[], %(results)s::text[], %(keys)s::text[], %(states)s::text[],
    %(bodies)s::bytea[], %(lifetimes)s::double precision[])
    AS r(job_id, of_run, result, key, state, body, expires_s)
  CROSS JOIN LATERAL (
    SELECT FROM {jobs} x WHERE x.id = r.job_id FOR NO KEY UPDATE OF x SKIP LOCKED) free"""
"""The runs of a page that are to end, and whose jobs no transaction has locked, as SQL."""


_CLOSED = "SELECT c.key, c.state, c.body, c.expires_s FROM closed c WHERE c.key IS NOT NULL"


def _end_of_run(
    changes: str, condition: str, *, closes: str = "false", goes_on: str, in_page: bool = False
) -> Statement:
    """Return a statement that ends runs; the marker is cleared in this text and nowhere else.

    It closes the asking if `closes` is true, and removes the message unless `goes_on` is: both judge the new status. It
    keeps the result, if any, of an asking that it closes.
    """
    return Statement(
        f"""
WITH r AS MATERIALIZED ({_RUNS_OF_PAGE if in_page else _NAMED_RUN}),
ended AS (
  UPDATE {{jobs}} j SET unit_no = NULL, worker_id = NULL, run_kind = NULL, timer_in_run = false, changes = changes + 2,
    {changes}
  FROM r
  WHERE j.id = r.job_id AND j.run_no = r.of_run AND j.worker_id = %(worker_id)s AND {condition}
  RETURNING id, run_no, status, changes, parent_id, has_dependents, {closes} AS closes, {goes_on} AS goes_on,
    ran_at, r.result, r.key, r.state, r.body, r.expires_s),{ENDED.format()},
closed AS (
  UPDATE {{askings}} a SET closed_at = now(), outcome = %(outcome)s, result = ended.result,
    stored_at = CASE WHEN %(unwanted)s AND a.options IS NULL THEN now() END
  FROM ended WHERE a.job_id = ended.id AND a.closed_at IS NULL AND ended.closes
  RETURNING a.job_id, a.task_id, a.options::text AS options, ended.key, ended.state, ended.body, ended.expires_s),
{(kept_briefly if in_page else kept)(_CLOSED)},
{f"{told('closed g')}," if in_page else ""}
disarmed AS (
  DELETE FROM {{messages}} m USING ended WHERE m.job_id = ended.id AND NOT ended.goes_on)
SELECT ended.id, ended.status, ended.changes, ended.parent_id, ended.has_dependents, ended.closes, ended.goes_on,
  closed.task_id, closed.options, {TOLD if in_page else LISTENED}
FROM ended LEFT JOIN closed ON closed.job_id = ended.id""",
        frequent=True,
    )


_REVIVED = """(wakes > wakes_taken
      OR EXISTS (SELECT FROM {timers} t WHERE t.job_id = j.id AND t.ask = 'force'))"""
"""Whether a forced run was asked for since the job was terminated, for now or for later, as SQL."""

_end = partial(
    _end_of_run,
    f"""ended_run = run_no, started = started OR %(applied)s, losses = 0, ended_at = now(), error = %(error)s::json,
    failed_by = NULL,
    retries = CASE WHEN %(retry)s AND NOT %(then)s THEN retries + 1 ELSE 0 END,
    status = CASE
      WHEN run_kind = 'shutdown' THEN CASE WHEN {_REVIVED} THEN 'queued' ELSE 'terminated' END
      WHEN status = 'terminating' THEN 'terminating'
      WHEN wakes > wakes_taken OR %(retry)s THEN 'queued'
      WHEN timer_in_run AND EXISTS (
        SELECT FROM {{timers}} t WHERE t.job_id = j.id AND t.ask <> 'timeout') THEN 'queued'
      ELSE %(outcome)s END""",
    """(unit_no = %(unit_no)s OR %(unit_no)s IS NULL)
    AND (NOT %(quiet)s
      OR status = 'running' AND run_kind = 'run' AND wakes = wakes_taken AND NOT timer_in_run AND parent_id IS NULL
        AND has_dependents IS NULL)""",
    closes="(%(outcome)s <> 'suspended' AND (NOT %(retry)s OR status = 'terminating'))",
    goes_on="(status = 'terminating' OR status = 'queued' AND (wakes > wakes_taken OR %(retry)s))",
)
_END, _END_PAGE = _end(), _end(in_page=True)


def end(
    executor: Transaction, job_id: int, *, run_no: int, unit_no: int | None, worker_id: int, outcome: str, result: str,
    unwanted: bool, applied: bool, retry: bool, error: str | None, then: bool = False, quiet: bool = False,
    past: Past = NO_PAST, keeps: Kept | None = None,
) -> Any | None:  # fmt: skip
    """End the run with the status its job now has; None if it is no longer the job's current run.

    Its asking is closed with `result`, unless it goes on; the message of a job that comes to rest is removed.
    `retry`: another run of the same asking is owed: this one is repeated, or (`then`) the job has a next stage.
    `unwanted`: nobody waits for the result, unless the asking's options say so. `keeps`: the result as
    Celery's, which is kept if the asking is closed; then the row tells whether a process listens.

    Wakes, termination and timers that came since the claim win over `outcome`. With `unit_no=None` the worker makes the
    end, of a run whose process it stopped. The lock was an earlier statement: the sub-selects see every timer that was
    committed under it.

    With `quiet` the job need not be locked before. The end is made only if the job was not asked during the run, has no
    parent to wake, and no job depends on it; columns of the job's own row tell that. Then only the run itself writes
    its asking and its message, and no sub-select can have a snapshot older than the lock.
    """
    return first(executor.run(
        _END, id=job_id, run_no=run_no, unit_no=unit_no, worker_id=worker_id,
        outcome=outcome, result=result, unwanted=unwanted, applied=applied, retry=retry, error=error, then=then,
        quiet=quiet, **past, **given(keeps),
    ))  # fmt: skip


def end_page(executor: Transaction, runs: Iterable[Ended], *, worker_id: int, history: int) -> Sequence[Any]:
    """End runs, (job id, run number, its asking's result as JSON text), that leave nothing else to be written.

    Returns the rows of those that have ended, as `end` does. The others are as they were: each end is `quiet`, and a
    job that a transaction has locked is passed over. No unit was committed.
    """
    over = sorted(runs, key=lambda one: one.run)
    ids, run_nos, results = columns([one.run for one in over], 3)
    past = NO_PAST | {"how": "completed", "history": history}
    return executor.run(
        _END_PAGE, ids=ids, run_nos=run_nos, results=results, worker_id=worker_id, unit_no=0, outcome="completed",
        unwanted=True, applied=True, retry=False, error=None, then=False, quiet=True, **past,
        **results_of([one.result for one in over]),
    )  # fmt: skip


_OUTCOME = Statement("""
SELECT j.task, j.run_no, j.unit_no, j.worker_id, j.ended_run, j.status FROM {jobs} j WHERE j.id = %(id)s""")


def outcome(executor: Reader, job_id: int) -> Any | None:
    """Read the columns that tell whether a commit was applied whose answer was lost."""
    return first(executor.run(_OUTCOME, id=job_id))


_MAY_TAKE = f"(%(own)s OR NOT {LIVES})"

_RELEASE = _end_of_run(
    """losses = losses + CASE WHEN %(loss)s THEN 1 ELSE 0 END,
    run_no = run_no - CASE WHEN %(undone)s AND unit_no = 0 THEN 1 ELSE 0 END,
    rate_opens_at = CASE run_kind WHEN 'run' THEN rate_opens_at - make_interval(secs => rate_interval_s)
      ELSE rate_opens_at END,
    status = CASE status WHEN 'terminating' THEN status ELSE 'queued' END""",
    _MAY_TAKE,
    goes_on="true",
)
_GIVE_UP = _end_of_run(
    f"""ended_at = now(), error = %(result)s::json, retries = 0,
    wakes_taken = CASE status WHEN 'terminating' THEN wakes_taken ELSE wakes END,
    losses = CASE WHEN status = 'terminating' AND {_REVIVED} THEN 0 ELSE losses + 1 END,
    status = CASE WHEN status <> 'terminating' THEN 'failed' WHEN {_REVIVED} THEN 'queued' ELSE 'terminated' END""",
    _MAY_TAKE,
    closes="true",
    goes_on="(status = 'queued' AND wakes > wakes_taken)",
)


def release(
    executor: Transaction,
    job_id: int,
    *,
    run_no: int,
    worker_id: int,
    own: bool,
    loss: bool,
    undone: bool = False,
    outcome: str | None = None,
    error: str | None = None,
    unwanted: bool = False,
    past: Past = NO_PAST,
) -> Any | None:
    """Take a run from its worker, a dead one or the worker's `own`. The job is queued again, or terminating.

    The inputs are unchanged, because only whole units of the run were committed. The run begins again, so it gives its
    token back to the job's bucket. One that is `undone` has not begun: the next run has its number, and its message is
    valid again. With an `outcome` the job has lost too many runs and rests: its asking is closed with the outcome and
    the `error`. A pending wake is recorded in the dead set; a terminating job is instead queued for it, or for a forced
    timer. Returns the same as `end`.
    """
    return first(executor.run(
        _RELEASE if outcome is None else _GIVE_UP, id=job_id, run_no=run_no, worker_id=worker_id, own=own, loss=loss,
        undone=undone, outcome=outcome, result=error, unwanted=unwanted, **past, **given(None),
    ))  # fmt: skip
