"""A run's hold on its job: claim, fence, end, and the release of what a dead or stopping worker held.

The in-run marker is `unit_no`, `worker_id` and `run_kind` in `jobs`, cleared by the end and by every release, so that
a zombie's fence finds nothing (`run_no` alone would still match after a release).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .jobs import FIRST_LOOK_S, HANDLE
from .statement import Executor, Statement

_RUN = """j.id, j.task, j.queue, j.priority, j.args::text AS args, j.kwargs::text AS kwargs, j.parent_id, j.name,
  j.created_by, j.created_at, j.ran_at, j.status, j.run_no, j.unit_no, j.run_kind, j.worker_id, j.losses, j.retries,
  j.started, j.terminate_tree, j.wakes_taken, j.nudges, a.task_id, a.options::text AS options"""
"""What a run needs to know of its job and its asking."""

_CLAIM = Statement(
    """
WITH claimed AS (
  UPDATE {jobs} SET run_no = run_no + 1, unit_no = 0, worker_id = %(worker_id)s, timer_in_run = false,
    run_kind = CASE status WHEN 'queued' THEN 'run' ELSE 'shutdown' END,
    wakes_taken = CASE status WHEN 'queued' THEN wakes ELSE wakes_taken END,
    ran_at = CASE status WHEN 'queued' THEN now() ELSE ran_at END,
    status = CASE status WHEN 'queued' THEN 'running' ELSE status END
  WHERE id = %(id)s AND task = %(task)s AND status IN ('queued', 'terminating') AND unit_no IS NULL
    AND run_no = %(for_run)s - 1
    AND EXISTS (SELECT FROM {messages} m WHERE m.job_id = {jobs}.id AND m.for_run = %(for_run)s AND m.due_at <= now())
    AND EXISTS (SELECT FROM {workers} w WHERE w.id = %(worker_id)s AND w.dead_at IS NULL)
  RETURNING *),
held AS (
  UPDATE {messages} m SET locked_by = %(worker_id)s, locked_at = now(), locked_pid = %(pid)s, missing_at = NULL,
    look_at = 'infinity'
  FROM claimed WHERE m.job_id = claimed.id RETURNING m.losses),
past AS (
  DELETE FROM {timers} t USING claimed
  WHERE t.job_id = claimed.id AND claimed.run_kind = 'run' AND t.due_at <= now() AND t.ask IN ('run', 'force')
    AND NOT EXISTS (
      SELECT FROM {timers} e WHERE e.job_id = t.job_id AND e.id < t.id AND e.ask IN ('terminate', 'terminate_tree')))
SELECT """
    + _RUN
    + """, (SELECT held.losses > 0 FROM held) AS takes
FROM claimed j LEFT JOIN {askings} a ON a.job_id = j.id AND a.closed_at IS NULL"""
)


def claim(executor: Executor, job_id: int, *, task: str, for_run: int, worker_id: int) -> Any | None:
    """Begin run `for_run` of the job for this worker, unless the delivery is stale; returns what the run needs.

    None as well if the job is of another `task` than the delivery says.

    Every column that decides is in `jobs`: of two claims that waited for each other only one finds its row. The
    message's row may be seen as of the statement's start, harmlessly: its `due_at` moves forward only with `run_no`.
    The process's id is noted, so that the worker's parent knows what to rescue when this process dies.
    """
    found = executor.run(_CLAIM, id=job_id, task=task, for_run=for_run, worker_id=worker_id, pid=os.getpid())
    return found[0] if found else None


_READ_CLAIMED = Statement(f"""
SELECT {_RUN}, (SELECT m.losses > 0 FROM {{messages}} m WHERE m.job_id = j.id) AS takes
FROM {{jobs}} j LEFT JOIN {{askings}} a ON a.job_id = j.id AND a.closed_at IS NULL WHERE j.id = %(id)s""")


def read_claimed(executor: Executor, job_id: int) -> Any | None:
    """Read again what `claim` returned: its answer was lost, or its process is gone."""
    found = executor.run(_READ_CLAIMED, id=job_id)
    return found[0] if found else None


_FENCE = Statement("""
UPDATE {jobs} SET unit_no = unit_no + 1, losses = 0, started = true
WHERE id = %(id)s AND run_no = %(run_no)s AND unit_no = %(unit_no)s AND worker_id = %(worker_id)s
RETURNING status""")


def fence(executor: Executor, job_id: int, *, run_no: int, unit_no: int, worker_id: int) -> bool:
    """Pass if the run is still the job's current one and this unit was not applied yet; the job is locked."""
    return bool(executor.run(_FENCE, id=job_id, run_no=run_no, unit_no=unit_no, worker_id=worker_id))


_END = Statement("""
WITH ended AS (
  UPDATE {jobs} j SET unit_no = NULL, worker_id = NULL, run_kind = NULL, ended_run = run_no, timer_in_run = false,
    wakes_taken = greatest(wakes_taken, %(seen)s::bigint),
    started = started OR %(applied)s, losses = 0, ended_at = now(), error = %(error)s::json,
    retries = CASE WHEN %(retry)s THEN retries + 1 ELSE 0 END,
    status = CASE
      WHEN run_kind = 'shutdown' THEN CASE
        WHEN wakes > wakes_taken OR EXISTS (SELECT FROM {timers} t WHERE t.job_id = j.id AND t.ask = 'force')
          THEN 'queued'
        ELSE 'terminated' END
      WHEN status = 'terminating' THEN 'terminating'
      WHEN wakes > greatest(wakes_taken, %(seen)s::bigint) OR %(retry)s THEN 'queued'
      WHEN timer_in_run AND EXISTS (SELECT FROM {timers} t WHERE t.job_id = j.id) THEN 'queued'
      ELSE %(outcome)s END
  WHERE id = %(id)s AND run_no = %(run_no)s AND (unit_no = %(unit_no)s OR %(unit_no)s IS NULL)
    AND worker_id = %(worker_id)s
    AND (NOT %(quiet)s
      OR status = 'running' AND run_kind = 'run' AND wakes = wakes_taken AND NOT timer_in_run AND parent_id IS NULL)
  RETURNING id, status, wakes > wakes_taken AS asked_again, retries, parent_id),
closed AS (
  UPDATE {askings} a SET closed_at = now(), outcome = %(outcome)s, result = %(result)s::json,
    stored_at = CASE WHEN %(unwanted)s AND a.options IS NULL THEN now() END
  FROM ended
  WHERE a.job_id = ended.id AND a.closed_at IS NULL AND %(outcome)s <> 'suspended'
    AND (NOT %(retry)s OR ended.status = 'terminating')
  RETURNING a.job_id, a.task_id, a.options::text AS options),
disarmed AS (
  DELETE FROM {messages} m USING ended
  WHERE m.job_id = ended.id
    AND NOT (ended.status = 'terminating' OR ended.status = 'queued' AND (ended.asked_again OR %(retry)s)))
SELECT ended.*, closed.task_id, closed.options FROM ended LEFT JOIN closed ON closed.job_id = ended.id""")


def end(
    executor: Executor,
    job_id: int,
    *,
    run_no: int,
    unit_no: int | None,
    worker_id: int,
    outcome: str,
    result: str,
    unwanted: bool,
    applied: bool,
    retry: bool,
    error: str | None,
    seen: int | None = None,
    quiet: bool = False,
) -> Any | None:
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
    found = executor.run(
        _END, id=job_id, run_no=run_no, unit_no=unit_no, worker_id=worker_id, outcome=outcome, result=result,
        unwanted=unwanted, applied=applied, retry=retry, error=error, seen=seen, quiet=quiet,
    )  # fmt: skip
    return found[0] if found else None


_LOOK = Statement(f"""
SELECT p.wakes, p.nudges,
  p.ended_at IS NULL AND p.status <> 'terminating' AND EXISTS (
    SELECT FROM {{jobs}} a
    WHERE a.id = p.parent_id AND a.terminate_tree AND a.status IN ('terminating', 'terminated')) AS came_late, c.*
FROM {{jobs}} p
LEFT JOIN LATERAL (SELECT {HANDLE} FROM {{jobs}} j WHERE j.parent_id = p.id LIMIT %(most)s) c ON true
WHERE p.id = %(id)s ORDER BY c.id""")


def look(executor: Executor, job_id: int, *, most: int) -> Sequence[Any]:
    """Read how often the job was asked for so far, how many of those were nudges, and its children, in one snapshot.

    Reads `most` children and no more: where there are so many, there may be others. `came_late`: it never came to
    rest, nobody terminated it, and its parent was terminated with all that was below it, before the transaction was
    committed that made it a child.
    """
    return executor.run(_LOOK, id=job_id, most=most)


_TOUCH = Statement("""
UPDATE {messages} SET locked_at = now()
WHERE job_id = %(id)s AND for_run = %(run_no)s AND locked_by = %(worker_id)s RETURNING job_id""")


def touch(executor: Executor, job_id: int, *, run_no: int, worker_id: int) -> bool:
    """Move the deadline of a run that renews its own lease; False if the run is no longer current."""
    return bool(executor.run(_TOUCH, id=job_id, run_no=run_no, worker_id=worker_id))


_OVERDUE = Statement("""
SELECT m.job_id, m.for_run AS run_no, m.locked_pid AS pid
FROM {messages} m JOIN unnest(%(ids)s::bigint[], %(leases_s)s::double precision[]) AS r(job_id, lease_s)
  ON m.job_id = r.job_id
WHERE m.locked_by = %(worker_id)s AND m.locked_at < now() - make_interval(secs => r.lease_s)""")


def overdue(executor: Executor, leases: Mapping[int, float], *, worker_id: int) -> Sequence[Any]:
    """Read which of a worker's runs, {job id: lease in seconds}, have not renewed their own lease in time."""
    return executor.run(
        _OVERDUE, ids=list(leases), leases_s=[float(lease) for lease in leases.values()], worker_id=worker_id
    )


_OUTCOME = Statement("""
SELECT j.task, j.run_no, j.unit_no, j.worker_id, j.ended_run, j.status, m.locked_pid AS pid
FROM {jobs} j LEFT JOIN {messages} m ON m.job_id = j.id WHERE j.id = %(id)s""")


def outcome(executor: Executor, job_id: int) -> Any | None:
    """Read what tells whether a commit whose answer was lost was applied."""
    found = executor.run(_OUTCOME, id=job_id)
    return found[0] if found else None


_REARM = Statement("""
UPDATE {messages} SET task_id = coalesce(%(task_id)s, task_id), for_run = %(for_run)s, locked_by = NULL,
  locked_at = NULL, locked_pid = NULL, missing_at = NULL, published_at = NULL,
  due_at = now() + make_interval(secs => %(wait_s)s),
  look_at = now() + make_interval(secs => %(wait_s)s::double precision
    + CASE WHEN %(wait_s)s > 0::double precision THEN 0 ELSE %(first_look_s)s::double precision END),
  look_after = make_interval(secs => %(look_after_s)s), losses = losses + CASE WHEN %(moved)s THEN 1 ELSE 0 END
WHERE job_id = %(id)s
RETURNING task_id, for_run,
  (SELECT a.options::text FROM {askings} a WHERE a.task_id = {messages}.task_id) AS options""")


def rearm(
    executor: Executor, job_id: int, *, for_run: int, look_after_s: float, task_id: str | None = None,
    wait_s: float = 0, moved: bool = False,
) -> Any:  # fmt: skip
    """Turn the message of a run that is over into the message of the next; the same task id unless one is given.

    `moved`: another reader had packets that the run had read. A job's message counts that as a loss, and as long as it
    is there, runs take the packets that they read.
    """
    return executor.run(
        _REARM, id=job_id, for_run=for_run, task_id=task_id, wait_s=float(wait_s), look_after_s=look_after_s,
        first_look_s=FIRST_LOOK_S, moved=moved,
    )[0]  # fmt: skip


_DISARM = Statement("DELETE FROM {messages} WHERE job_id = %(id)s")


def disarm(executor: Executor, job_id: int) -> None:
    """Remove the message of a job that comes to rest."""
    executor.run(_DISARM, id=job_id)


_RELEASE = Statement("""
UPDATE {jobs} SET unit_no = NULL, worker_id = NULL, run_kind = NULL,
  losses = losses + CASE WHEN %(loss)s THEN 1 ELSE 0 END, timer_in_run = false,
  status = CASE status WHEN 'terminating' THEN status ELSE 'queued' END
WHERE id = %(id)s AND run_no = %(run_no)s AND worker_id = %(worker_id)s
  AND (%(own)s OR NOT EXISTS (SELECT FROM {workers} w WHERE w.id = %(worker_id)s AND w.dead_at IS NULL))
RETURNING status, losses, wakes > wakes_taken AS asked_again, parent_id""")


def release(executor: Executor, job_id: int, *, run_no: int, worker_id: int, own: bool, loss: bool) -> Any | None:
    """Take a run from its worker: from a dead one, or the worker's `own`. The job is queued again, or terminating.

    The inputs are as they were, because nothing of the run was committed but whole units.
    """
    found = executor.run(_RELEASE, id=job_id, run_no=run_no, worker_id=worker_id, own=own, loss=loss)
    return found[0] if found else None


_PUT_TO_REST = Statement("""
UPDATE {jobs} SET wakes_taken = CASE WHEN %(status)s = 'queued' THEN wakes_taken ELSE wakes END,
  losses = CASE WHEN %(status)s = 'queued' THEN 0 ELSE losses END,
  status = %(status)s, ended_at = now(), error = %(error)s::json, retries = 0
WHERE id = %(id)s""")


def put_to_rest(executor: Executor, job_id: int, *, status: str, error: str) -> None:
    """Put a job that lost too many runs to rest; a wake that was pending is recorded in the dead set."""
    executor.run(_PUT_TO_REST, id=job_id, status=status, error=error)


_HELD = Statement("""
SELECT m.job_id, m.for_run AS run_no, m.locked_pid AS pid,
  m.locked_at < now() - make_interval(secs => %(older_than_s)s) AS old
FROM {messages} m WHERE m.locked_by = %(worker_id)s AND m.job_id IS NOT NULL ORDER BY m.job_id""")


_HELD_BY_NOBODY = Statement("""
SELECT m.job_id, m.for_run AS run_no, m.locked_by AS worker_id FROM {messages} m
WHERE m.locked_by IS NOT NULL AND m.job_id IS NOT NULL AND NOT EXISTS (
  SELECT FROM {workers} w WHERE w.id = m.locked_by AND w.dead_at IS NULL)
ORDER BY m.job_id LIMIT %(limit)s""")


def held_by_nobody(executor: Executor, limit: int) -> Sequence[Any]:
    """Read runs whose worker is dead and forgotten: its claim had waited for a lock and was committed after it died.

    Reads the whole of `messages`: once per lease.
    """
    return executor.run(_HELD_BY_NOBODY, limit=limit)


def held_by(executor: Executor, worker_id: int, *, older_than_s: float = 0) -> Sequence[Any]:
    """Read the runs a worker holds. Reads the whole of `messages`: once per death, seldom otherwise."""
    return executor.run(_HELD, worker_id=worker_id, older_than_s=older_than_s)
