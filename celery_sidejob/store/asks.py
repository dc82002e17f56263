"""Rows of `askings` and `timers`: asking a job to run or to terminate, now or later.

An asking is one request to run, from `run()` until completed or failed, with its Celery options. A closed asking keeps
its outcome and result until the result backend has them. The unique key of an open job is in its first asking, and is
taken until that asking is closed.

Every statement that asks expects the jobs to be locked already (`jobs.lock`), so its sub-selects see all earlier
commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..model.status import Gate
from . import advisory
from .dependencies import NOTED
from .outbox.arming import OPENS_AT, armed
from .outbox.references import withdrawn
from .statement import Frequent, Reader, Statement, Transaction, first, first_value


def still_called(job_id: str) -> str:
    """Return SQL for the options of a job's next asking: a step that has called the job needs its value again."""
    return f"""(
    SELECT json_build_object('called', true) FROM {{askings}} c
    WHERE c.job_id = {job_id} AND c.options->>'called' = 'true' LIMIT 1)"""


_OPEN = Statement(f"""
WITH spent AS (DELETE FROM {{askings}} WHERE job_id = %(id)s AND stored_at < now() - interval '1 hour')
INSERT INTO {{askings}} (task_id, job_id, options, unique_key)
SELECT gen_random_uuid()::text, %(id)s, {still_called("%(id)s")}, (
  SELECT a.unique_key FROM {{askings}} a WHERE a.job_id = %(id)s AND a.closed_at = now() AND a.outcome <> 'terminated')
RETURNING task_id""")


def open_next(executor: Transaction, job_id: int) -> str:
    """Open the next asking of a job that has none open, and return its task id.

    It gets the unique key of the asking that this transaction has closed, because the job has not rested in between.
    """
    return str(executor.run(_OPEN, id=job_id)[0].task_id)


_KEEP_KEY = Statement("""
INSERT INTO {askings} (task_id, job_id, unique_key)
SELECT gen_random_uuid()::text, a.job_id, a.unique_key FROM {askings} a
WHERE a.job_id = %(id)s AND a.closed_at = now() AND a.outcome <> 'terminated' AND a.unique_key IS NOT NULL
RETURNING task_id""")


def keep_key(executor: Transaction, job_id: int) -> str | None:
    """Open the next asking of a job whose run has ended and which waits for a timer, or for its shutdown.

    Only a job with a unique key needs this, to keep the key: it has not rested. Returns the task id; None for a job
    without a key, whose next asking is opened when the timer is due, or never for a shutdown.
    """
    return first_value(executor.run(_KEEP_KEY, id=job_id), str)


_STORED = Statement("""
UPDATE {askings} a SET stored_at = now() FROM unnest(%(task_ids)s::text[]) AS r(task_id)
WHERE a.task_id = r.task_id""")


def mark_stored(executor: Transaction, task_ids: Iterable[str]) -> None:
    """Note that the result backend has the results."""
    executor.run(_STORED, task_ids=list(task_ids))


_UNSENT = Statement("""
SELECT a.closed_at, a.task_id, j.id, a.outcome, a.result::text AS result, a.options::text AS options, j.task,
  j.args::text AS args, j.kwargs::text AS kwargs, j.queue
FROM {askings} a JOIN {jobs} j ON j.id = a.job_id
WHERE a.closed_at IS NOT NULL AND a.stored_at IS NULL AND a.closed_at <= now() - make_interval(secs => %(older_than_s)s)
  AND a.closed_at >= coalesce(%(since)s::timestamptz, '-infinity')
ORDER BY a.closed_at LIMIT %(limit)s""")


def unsent(executor: Reader, *, older_than_s: float, limit: int, since: Any = None) -> Sequence[Any]:
    """Read askings whose result the backend does not have yet, oldest first; optionally those closed `since` a time."""
    return executor.run(_UNSENT, older_than_s=older_than_s, limit=limit, since=since)


_OUTCOME = Statement("""
SELECT task_id, outcome, result::text AS result FROM {askings} WHERE task_id = %(task_id)s""")


def outcome(executor: Reader, task_id: str) -> Any | None:
    """Read how an asking ended."""
    return first(executor.run(_OUTCOME, task_id=task_id))


_JOBS_OF = Statement("SELECT task_id, job_id FROM {askings} WHERE task_id = ANY(%(task_ids)s::text[])")


def jobs_of(executor: Reader, task_ids: Iterable[str]) -> dict[str, int]:
    """Return the job ids of these askings, {task id: job id}; a task id without an asking is missing."""
    return {row.task_id: row.job_id for row in executor.run(_JOBS_OF, task_ids=list(task_ids))}


KEYS_LOCK_CLASS = 0x53_4A_55_51 - 0x40_00_00_00
"""The first half of the advisory locks' keys ("SJUQ", made to fit as `workers.LOCK_CLASS` is)."""


def take_turn_for_keys(executor: Transaction, keys: Iterable[str]) -> None:
    """Wait until no other transaction makes a job with one of these keys; later statements see its commit."""
    advisory.take(executor, KEYS_LOCK_CLASS, keys)


_KEY_HOLDERS = Statement("""
SELECT a.unique_key AS key, a.task_id, a.job_id, j.ran_at IS NULL AND j.status = 'queued' AS waits
FROM {askings} a JOIN {jobs} j ON j.id = a.job_id
WHERE a.unique_key = ANY(%(keys)s::text[]) AND a.closed_at IS NULL""")


def key_holders(executor: Reader, keys: Iterable[str]) -> Sequence[Any]:
    """Read the open jobs with these keys: (key, task_id, job_id, waits). `waits`: no run or shutdown has begun."""
    return executor.run(_KEY_HOLDERS, keys=list(keys))


_FREE_KEY = Statement("UPDATE {askings} SET unique_key = NULL WHERE job_id = %(job_id)s AND closed_at IS NULL")


def free_key(executor: Transaction, job_id: int) -> None:
    """Remove the key of a locked job, which another job replaces."""
    executor.run(_FREE_KEY, job_id=job_id)


_ASK = Frequent(
    """
WITH asked AS (
  UPDATE {jobs} SET wakes = wakes + 1, changes = changes + 1,
    losses = CASE WHEN status IN ('failed', 'terminated') THEN 0 ELSE losses END,
    status = CASE status WHEN 'terminating' THEN status ELSE 'queued' END
  WHERE id = ANY(%(ids)s::bigint[])
  RETURNING id, status, changes, unit_no, run_no, task, queue, priority, limit_key, rate_terminates, rate_opens_at,
    blocked, pool, pool_weight, pool_runs),
revived AS (
  DELETE FROM {dead} WHERE %(force)s AND job_id = ANY(%(ids)s::bigint[])),
opened AS (
  INSERT INTO {askings} (task_id, job_id, options)
  SELECT gen_random_uuid()::text, id, """
    + still_called("asked.id")
    + """
  FROM asked
  WHERE status = 'queued' AND NOT EXISTS (
    SELECT FROM {askings} a WHERE a.job_id = asked.id AND a.closed_at IS NULL)
  RETURNING task_id, job_id),
spent AS (
  DELETE FROM {askings} a USING opened WHERE a.job_id = opened.job_id AND a.stored_at < now() - interval '1 hour'),
/*!"""
    + withdrawn("{messages} m", "%(force)s AND m.job_id = ANY(%(ids)s::bigint[])")
    + """,*/"""
    + armed(
        "asked j LEFT JOIN opened ON opened.job_id = j.id "
        "LEFT JOIN {askings} a ON a.job_id = j.id AND a.closed_at IS NULL",
        task_id="coalesce(opened.task_id, a.task_id, gen_random_uuid()::text)",
        opens_at=OPENS_AT,
        cut_short="%(force)s",
        wait_s="-%(late_s)s::double precision",
    )
    + """
SELECT asked.id, asked.status, asked.changes, armed.task_id, armed.for_run, x.options::text AS options
FROM asked LEFT JOIN armed ON armed.job_id = asked.id LEFT JOIN {askings} x ON x.task_id = armed.task_id""",
)


def ask(
    executor: Transaction, ids: Iterable[int], *, force: bool, check_interval_s: float, late_s: float = 0.0
) -> Sequence[Any]:
    """Count one more wake of each job, and arm a message where no run is in progress: due since `late_s` seconds.

    With `force` a backoff is cut short and the job leaves the dead set. A job that begins anew after failing or
    terminating may lose all its runs again: its losses are reset. The caller has judged the legality under the lock.
    Returns a row for each job; rows with a `task_id` are to be published.
    """
    return executor.run(_ASK, ids=list(ids), force=force, check_interval_s=check_interval_s, late_s=late_s)


# `parked` reads `armed`, and then changes the rows that `armed` has not changed: one statement changes a row only once.
_TERMINATE = Statement(
    """
WITH asked AS (
  UPDATE {jobs} SET status = 'terminating', wakes_taken = wakes, changes = changes + 1, timer_in_run = false,
    blocked = NULL,
    losses = CASE status WHEN 'failed' THEN 0 ELSE losses END,
    terminate_tree = (status = 'terminating' AND terminate_tree) OR %(tree)s
  WHERE id = ANY(%(ids)s::bigint[]) AND status <> 'terminated'
  RETURNING id, changes, unit_no, run_no, queue, priority, limit_key, pool, pool_weight, pool_runs),
cancelled AS (
  DELETE FROM {timers} WHERE job_id = ANY(%(ids)s::bigint[]) AND (id < %(timers_before)s::bigint) IS NOT FALSE),
freed AS (
  DELETE FROM {dependencies} WHERE job_id IN (SELECT id FROM asked)),
settled AS (
  DELETE FROM {dead} WHERE job_id IN (SELECT id FROM asked)),/*!"""
    + withdrawn("{messages} m", "m.job_id = ANY(%(ids)s::bigint[])")
    + """,*/"""
    + armed(
        "asked j LEFT JOIN {askings} a ON a.job_id = j.id AND a.closed_at IS NULL",
        task_id="coalesce(a.task_id, gen_random_uuid()::text)",
        opens_at=None,
        cut_short=f"m.gate <> {Gate.WORKER}",
        waits="false",
        blocked="false",
    )
    + f""",
parked AS (
  UPDATE {{messages}} m SET declined_at = now() FROM asked
  WHERE m.job_id = asked.id AND m.gate = {Gate.WORKER} AND m.declined_at IS NULL AND (SELECT count(*) FROM armed) >= 0)
SELECT asked.id, asked.changes, armed.task_id, armed.for_run, x.options::text AS options
FROM asked LEFT JOIN armed ON armed.job_id = asked.id LEFT JOIN {{askings}} x ON x.task_id = armed.task_id"""
)


def terminate(
    executor: Transaction, ids: Iterable[int], *, tree: bool, check_interval_s: float, timers_before: int | None = None
) -> Sequence[Any]:
    """Make jobs terminating: remove earlier wakes and timers (up to the id `timers_before`), cut a backoff short.

    A parked job stays parked, for `parked.SHUTDOWN_WAITS_S` at most: no worker could run its shutdown.
    Returns a row for each job that was not terminated already; rows with a `task_id` are to be published.
    """
    return executor.run(
        _TERMINATE, ids=list(ids), tree=tree, check_interval_s=check_interval_s, timers_before=timers_before
    )


_ACCEPTED = """,
revived AS (
  DELETE FROM {dead} WHERE %(ask)s = 'force' AND job_id = %(id)s)
UPDATE {jobs} SET changes = changes + 1,
  status = CASE WHEN unit_no IS NULL AND status <> 'terminating' THEN 'queued' ELSE status END,
  losses = CASE WHEN status IN ('failed', 'terminated') THEN 0 ELSE losses END,
  timer_in_run = timer_in_run OR (unit_no IS NOT NULL AND %(ask)s <> 'timeout')
WHERE id = %(id)s RETURNING status, changes"""
"""Queues the job of an accepted timer, unless a run is in progress; a forced run takes the job out of the dead set."""

_SET_TIMER = Statement(f"""
WITH t AS (
  INSERT INTO {{timers}} (job_id, due_at, ask, accepted)
  VALUES (%(id)s, coalesce(%(due_at)s::timestamptz, now() + make_interval(secs => %(wait_s)s)), %(ask)s, true))
{_ACCEPTED}""")


def set_timer(executor: Transaction, job_id: int, *, due_at: Any, wait_s: float | None, ask: str) -> Any:
    """Have the job asked at a time, by the database's clock; it is queued at once unless a run is in progress.

    With ``force`` the job leaves the dead set now. With ``timeout`` the run in progress ends as it would without the
    timer, and the next run removes the timer. Returns the job's `status` and `changes`.
    """
    return executor.run(_SET_TIMER, id=job_id, due_at=due_at, wait_s=wait_s or 0.0, ask=ask)[0]


_ACCEPT = Statement(f"""
WITH t AS (
  INSERT INTO {{timers}} (id, job_id, due_at, ask, accepted) OVERRIDING SYSTEM VALUE
  VALUES (%(timer_id)s, %(id)s, %(due_at)s::timestamptz, %(ask)s, true)){_ACCEPTED}""")


def accept(executor: Transaction, job_id: int, timer: Any) -> Any:
    """Make a noted timer that was just taken count as one that is set now; it keeps its position in the order."""
    return executor.run(_ACCEPT, id=job_id, timer_id=timer.id, due_at=timer.later, ask=timer.ask)[0]


_NOTE = Statement("""
INSERT INTO {timers} (job_id, due_at, ask, accepted)
SELECT id, coalesce(%(due_at)s::timestamptz, now() + make_interval(secs => %(wait_s)s)), %(ask)s, false
FROM unnest(%(ids)s::bigint[]) AS id""")


def note(executor: Transaction, ids: Iterable[int], ask: str, *, due_at: Any = None, wait_s: float = 0.0) -> None:
    """Note asks without a lock: `mature` judges and applies them once this transaction has committed."""
    executor.run(_NOTE, ids=sorted(set(ids)), ask=ask, due_at=due_at, wait_s=wait_s)


_TAKE_DUE = Statement("""
DELETE FROM {timers} WHERE job_id = %(id)s AND (due_at <= now() OR NOT accepted)
RETURNING id, ask, accepted, CASE WHEN due_at > now() THEN due_at END AS later,
  greatest(0::double precision, extract(epoch FROM now() - due_at)::double precision) AS late_s""")


def take_due(executor: Transaction, job_id: int) -> list[Any]:
    """Remove the job's timers that are due or only noted, and return them, oldest first; the job is locked.

    Noted asks for `later` are judged now, and set again by `accept`.
    """
    return sorted(executor.run(_TAKE_DUE, id=job_id), key=lambda row: row.id)


_DROP_RUNS = Statement("DELETE FROM {timers} WHERE job_id = %(id)s AND ask IN ('run', 'look')")


def drop_runs(executor: Transaction, job_id: int) -> None:
    """Remove the timers that cannot affect a job that is now terminated: its termination was noted before them."""
    executor.run(_DROP_RUNS, id=job_id)


SOONEST = 1000
"""The number of soonest due timers that are searched for jobs: after an outage a million may be due."""

_DUE_TIMERS = Statement(f"""
SELECT t.job_id, bool_or(t.depends) AS depends FROM (
  (SELECT job_id, due_at, false AS depends FROM {{timers}} WHERE due_at <= now() ORDER BY due_at LIMIT {SOONEST})
  UNION ALL
  (SELECT job_id, now(), false FROM {{timers}} WHERE NOT accepted ORDER BY id LIMIT {SOONEST})
  UNION ALL
  (SELECT n.job_id, now(), true FROM ({NOTED}) n ORDER BY n.job_id LIMIT {SOONEST})) t
GROUP BY t.job_id ORDER BY min(t.due_at) LIMIT %(limit)s""")


def due(executor: Reader, limit: int) -> Sequence[Any]:
    """Read the ids of jobs with timers that are due or only noted, the longest waiting first.

    Includes jobs whose dependencies must be checked (`depends`).
    """
    return executor.run(_DUE_TIMERS, limit=limit)


IS_TIMER = "t.ask IN ('run', 'force', 'timeout') AND (t.accepted OR t.due_at > now())"
"""Whether a row is a timer, as SQL; other rows are asks that a transaction has noted, to be applied at once."""

_PENDING = Statement(f"""
SELECT t.id, t.due_at, t.ask FROM {{timers}} t WHERE t.job_id = %(id)s AND {IS_TIMER}
ORDER BY t.due_at, t.id LIMIT %(limit)s""")


def pending_timers(executor: Reader, job_id: int, *, limit: int | None = None) -> Sequence[Any]:
    """Read the job's timers that have not fired, soonest first; a due timer fires within about a second."""
    return executor.run(_PENDING, id=job_id, limit=limit)


_OF_COMPLETED = Statement(f"""
SELECT t.job_id, t.due_at FROM (SELECT * FROM {{timers}} ORDER BY due_at LIMIT {SOONEST}) t
  JOIN {{jobs}} j ON j.id = t.job_id
WHERE j.status = 'completed' AND {IS_TIMER} ORDER BY t.due_at, t.id""")


def timers_of_completed(executor: Reader) -> Sequence[Any]:
    """Read the (job_id, due_at) of timers, among the soonest, that will run a completed job again."""
    return executor.run(_OF_COMPLETED)


_CANCEL = Statement(f"""
DELETE FROM {{timers}} t WHERE t.job_id = %(id)s AND t.id = %(timer_id)s AND {IS_TIMER} RETURNING t.id""")


def cancel_timer(executor: Transaction, job_id: int, timer_id: int) -> bool:
    """Remove a timer of a locked job; False if it does not exist: it has fired, or a termination has removed it."""
    return bool(executor.run(_CANCEL, id=job_id, timer_id=timer_id))


_REST = Statement("""
WITH rests AS (
  SELECT j.id, j.ended_at, a.task_id,
    CASE WHEN a.closed_at IS NULL THEN 'suspended' WHEN a.closed_at < j.ended_at THEN 'terminated'
      ELSE a.outcome END AS status
  FROM {jobs} j LEFT JOIN LATERAL (
    SELECT a.task_id, a.closed_at, a.outcome FROM {askings} a
    WHERE a.job_id = j.id AND (a.closed_at IS NOT NULL OR a.opened_at IS DISTINCT FROM j.ended_at)
    ORDER BY a.closed_at DESC NULLS FIRST LIMIT 1) a ON true
  WHERE j.id = %(id)s AND j.status = 'queued' AND j.unit_no IS NULL
    AND NOT EXISTS (SELECT FROM {messages} m WHERE m.job_id = j.id)
    AND NOT EXISTS (SELECT FROM {timers} t WHERE t.job_id = j.id AND t.ask <> 'timeout')),
kept_its_key AS (
  DELETE FROM {askings} a USING rests
  WHERE a.job_id = rests.id AND a.closed_at IS NULL AND a.opened_at = rests.ended_at)
UPDATE {jobs} j SET changes = changes + 1,
  status = CASE rests.status WHEN 'terminated' THEN 'queued' ELSE rests.status END
FROM rests WHERE j.id = rests.id
RETURNING rests.status, j.changes, rests.task_id, j.retries, j.has_dependents, j.error::text AS error""")


def rest(executor: Transaction, job_id: int) -> Any | None:
    """Let a locked job rest as it did before, if it was queued only for timers and the last timer is gone.

    Returns the status in which it rested, with columns for the dead set; None if a run is owed, or in progress. A job
    that never ran, or whose asking is open, is suspended. If the job was terminated, the caller must terminate it
    again. The end of a run closes the asking of that run; only a shutdown may end without one. An asking that this end
    has opened (`keep_key`) is removed: it was meant for the timer.
    """
    return first(executor.run(_REST, id=job_id))
