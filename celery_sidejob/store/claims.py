"""A run's hold on its job: claim, fence, end, and the release of what a dead or stopping worker held.

The in-run marker is `unit_no`, `worker_id` and `run_kind` in `jobs`, cleared by every end, a release too, so that a
zombie's fence finds nothing (`run_no` alone would still match after a release).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .jobs import HANDLE, READ
from .outbox.holds import HELD, LIVES
from .statement import Reader, Statement, Transaction, first

_RUN = f"""j.id, {READ}, j.created_at, j.ran_at, j.status, j.run_no, j.unit_no, j.run_kind, j.worker_id, j.losses,
  j.retries, j.started, j.terminate_tree, j.wakes_taken, j.nudges, a.task_id, a.options::text AS options"""
"""What a run needs to know of its job and its asking."""

_CLAIM = Statement(f"""
WITH claimed AS (
  UPDATE {{jobs}} SET run_no = run_no + 1, unit_no = 0, worker_id = %(worker_id)s, timer_in_run = false,
    run_kind = CASE status WHEN 'queued' THEN 'run' ELSE 'shutdown' END,
    wakes_taken = CASE status WHEN 'queued' THEN wakes ELSE wakes_taken END,
    ran_at = CASE status WHEN 'queued' THEN now() ELSE ran_at END,
    status = CASE status WHEN 'queued' THEN 'running' ELSE status END
  WHERE id = %(id)s AND task = %(task)s AND status IN ('queued', 'terminating') AND unit_no IS NULL
    AND run_no = %(for_run)s - 1
    AND EXISTS (
      SELECT FROM {{messages}} m WHERE m.job_id = {{jobs}}.id AND m.for_run = %(for_run)s AND m.due_at <= now())
    AND {LIVES}
  RETURNING *),
held AS (
  UPDATE {{messages}} m SET {HELD}
  FROM claimed WHERE m.job_id = claimed.id RETURNING m.losses),
past AS (
  DELETE FROM {{timers}} t USING claimed
  WHERE t.job_id = claimed.id AND claimed.run_kind = 'run' AND t.due_at <= now() AND t.ask IN ('run', 'force')
    AND NOT EXISTS (
      SELECT FROM {{timers}} e WHERE e.job_id = t.job_id AND e.id < t.id AND e.ask IN ('terminate', 'terminate_tree')))
SELECT {_RUN}, (SELECT held.losses > 0 FROM held) AS takes
FROM claimed j LEFT JOIN {{askings}} a ON a.job_id = j.id AND a.closed_at IS NULL""")


def claim(executor: Transaction, job_id: int, *, task: str, for_run: int, worker_id: int) -> Any | None:
    """Begin run `for_run` of the job for this worker, unless the delivery is stale; returns what the run needs.

    None as well if the job is of another `task` than the delivery says.

    Every column that decides is in `jobs`: of two claims that waited for each other only one finds its row. The
    message's row may be seen as of the statement's start, harmlessly: its `due_at` moves forward only with `run_no`.
    The process's id is noted, so that the worker's parent knows what to rescue when this process dies.
    """
    return first(executor.run(_CLAIM, id=job_id, task=task, for_run=for_run, worker_id=worker_id, pid=os.getpid()))


_READ_CLAIMED = Statement(f"""
SELECT {_RUN}, (SELECT m.losses > 0 FROM {{messages}} m WHERE m.job_id = j.id) AS takes
FROM {{jobs}} j LEFT JOIN {{askings}} a ON a.job_id = j.id AND a.closed_at IS NULL WHERE j.id = %(id)s""")


def read_claimed(executor: Reader, job_id: int) -> Any | None:
    """Read again what `claim` returned: its answer was lost, or its process is gone."""
    return first(executor.run(_READ_CLAIMED, id=job_id))


_FENCE = Statement("""
UPDATE {jobs} SET unit_no = unit_no + 1, losses = 0, started = true
WHERE id = %(id)s AND run_no = %(run_no)s AND unit_no = %(unit_no)s AND worker_id = %(worker_id)s
RETURNING status""")


def fence(executor: Transaction, job_id: int, *, run_no: int, unit_no: int, worker_id: int) -> bool:
    """Pass if the run is still the job's current one and this unit was not applied yet; the job is locked."""
    return bool(executor.run(_FENCE, id=job_id, run_no=run_no, unit_no=unit_no, worker_id=worker_id))


def _end_of_run(changes: str, condition: str, *, closes: str = "false", goes_on: str) -> Statement:
    """Return a statement that ends a run; the marker is cleared in this text and nowhere else.

    It closes the asking if `closes` is true, and removes the message unless `goes_on` is: both judge the new status.
    """
    return Statement(f"""
WITH ended AS (
  UPDATE {{jobs}} j SET unit_no = NULL, worker_id = NULL, run_kind = NULL, timer_in_run = false, {changes}
  WHERE id = %(id)s AND run_no = %(run_no)s AND worker_id = %(worker_id)s AND {condition}
  RETURNING id, status, parent_id, {closes} AS closes, {goes_on} AS goes_on),
closed AS (
  UPDATE {{askings}} a SET closed_at = now(), outcome = %(outcome)s, result = %(result)s::json,
    stored_at = CASE WHEN %(unwanted)s AND a.options IS NULL THEN now() END
  FROM ended WHERE a.job_id = ended.id AND a.closed_at IS NULL AND ended.closes
  RETURNING a.job_id, a.task_id, a.options::text AS options),
disarmed AS (
  DELETE FROM {{messages}} m USING ended WHERE m.job_id = ended.id AND NOT ended.goes_on)
SELECT ended.*, closed.task_id, closed.options FROM ended LEFT JOIN closed ON closed.job_id = ended.id""")


_REVIVED = """(wakes > wakes_taken
      OR EXISTS (SELECT FROM {timers} t WHERE t.job_id = j.id AND t.ask = 'force'))"""
"""Whether a forced run was asked for since the job was terminated, for now or for later, as SQL."""

_END = _end_of_run(
    f"""ended_run = run_no, wakes_taken = greatest(wakes_taken, %(seen)s::bigint),
    started = started OR %(applied)s, losses = 0, ended_at = now(), error = %(error)s::json,
    retries = CASE WHEN %(retry)s THEN retries + 1 ELSE 0 END,
    status = CASE
      WHEN run_kind = 'shutdown' THEN CASE WHEN {_REVIVED} THEN 'queued' ELSE 'terminated' END
      WHEN status = 'terminating' THEN 'terminating'
      WHEN wakes > greatest(wakes_taken, %(seen)s::bigint) OR %(retry)s THEN 'queued'
      WHEN timer_in_run AND EXISTS (SELECT FROM {{timers}} t WHERE t.job_id = j.id) THEN 'queued'
      ELSE %(outcome)s END""",
    """(unit_no = %(unit_no)s OR %(unit_no)s IS NULL)
    AND (NOT %(quiet)s
      OR status = 'running' AND run_kind = 'run' AND wakes = wakes_taken AND NOT timer_in_run AND parent_id IS NULL)""",
    closes="(%(outcome)s <> 'suspended' AND (NOT %(retry)s OR status = 'terminating'))",
    goes_on="(status = 'terminating' OR status = 'queued' AND (wakes > wakes_taken OR %(retry)s))",
)


def end(
    executor: Transaction, job_id: int, *, run_no: int, unit_no: int | None, worker_id: int, outcome: str, result: str,
    unwanted: bool, applied: bool, retry: bool, error: str | None, seen: int | None = None, quiet: bool = False,
) -> Any | None:  # fmt: skip
    """End the run with the status its job now has; None if it is no longer the job's current run.

    Its asking is closed with `result`, unless it goes on; the message of a job that comes to rest is removed.
    `unwanted`: nobody waits for the result, unless the asking's options say so.

    Wakes, termination and timers that came since the claim win over `outcome`; wakes up to `seen` came before the body
    began, and only said that there is something to see. With `unit_no=None` the end is the
    worker's own, for a run whose process it stopped. The lock was a statement before this one, so the sub-selects see
    every timer that was committed under it.

    With `quiet` the job need not be locked before: the end is made only if nothing was asked during the run and there
    is no parent to wake, which columns of the job's own row tell. Then nothing but the run itself writes its asking and
    its message, and there is no sub-select whose snapshot could be older than the lock.
    """
    return first(executor.run(
        _END, id=job_id, run_no=run_no, unit_no=unit_no, worker_id=worker_id, outcome=outcome, result=result,
        unwanted=unwanted, applied=applied, retry=retry, error=error, seen=seen, quiet=quiet,
    ))  # fmt: skip


_LOOK = Statement(f"""
SELECT p.wakes, p.nudges,
  p.ended_at IS NULL AND p.status <> 'terminating' AND EXISTS (
    SELECT FROM {{jobs}} a
    WHERE a.id = p.parent_id AND a.terminate_tree AND a.status IN ('terminating', 'terminated')) AS came_late, c.*
FROM {{jobs}} p
LEFT JOIN LATERAL (SELECT {HANDLE} FROM {{jobs}} j WHERE j.parent_id = p.id LIMIT %(most)s) c ON true
WHERE p.id = %(id)s ORDER BY c.id""")


def look(executor: Reader, job_id: int, *, most: int) -> Sequence[Any]:
    """Read how often the job was asked for so far, how many of those were nudges, and its children, in one snapshot.

    Reads `most` children and no more: where there are so many, there may be others. `came_late`: it never came to
    rest, nobody terminated it, and its parent was terminated with all that was below it, before the transaction was
    committed that made it a child.
    """
    return executor.run(_LOOK, id=job_id, most=most)


_OUTCOME = Statement("""
SELECT j.task, j.run_no, j.unit_no, j.worker_id, j.ended_run, j.status, m.locked_pid AS pid
FROM {jobs} j LEFT JOIN {messages} m ON m.job_id = j.id WHERE j.id = %(id)s""")


def outcome(executor: Reader, job_id: int) -> Any | None:
    """Read what tells whether a commit whose answer was lost was applied."""
    return first(executor.run(_OUTCOME, id=job_id))


_MAY_TAKE = f"(%(own)s OR NOT {LIVES})"

_RELEASE = _end_of_run(
    """losses = losses + CASE WHEN %(loss)s THEN 1 ELSE 0 END,
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
    executor: Transaction, job_id: int, *, run_no: int, worker_id: int, own: bool, loss: bool,
    outcome: str | None = None, error: str | None = None, unwanted: bool = False,
) -> Any | None:  # fmt: skip
    """Take a run from its worker: from a dead one, or the worker's `own`. The job is queued again, or terminating.

    The inputs are as they were, because nothing of the run was committed but whole units. With an `outcome` the job has
    lost too many runs and rests: its asking is closed with the outcome and the `error`. A pending wake is recorded in
    the dead set, but a job that was terminating is queued for it, or for a forced timer. Returns what `end` does.
    """
    return first(executor.run(
        _RELEASE if outcome is None else _GIVE_UP, id=job_id, run_no=run_no, worker_id=worker_id, own=own, loss=loss,
        outcome=outcome, result=error, unwanted=unwanted,
    ))  # fmt: skip
