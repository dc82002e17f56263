"""The ends of runs: by the run itself, in a page by its worker, or because its worker is dead or stops (`release`).

Each clears the run's mark in its job (`claims.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from .history import ENDED
from .outbox.holds import LIVES
from .results import GIVEN, LISTENED, TOLD, Ended, Kept, given, kept, kept_briefly, results_of, told
from .statement import Frequent, Statement, Transaction, columns, first

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
    return Frequent(f"""
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
FROM ended LEFT JOIN closed ON closed.job_id = ended.id""")


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
    past = NO_PAST | {"how": "completed", "history": history}
    return executor.run(
        _END_PAGE, worker_id=worker_id, unit_no=0, outcome="completed", unwanted=True, applied=True, retry=False,
        error=None, then=False, quiet=True, **past, **columns([one.run for one in over], "ids", "run_nos", "results"),
        **results_of([one.result for one in over]),
    )  # fmt: skip


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
