"""Rows of `askings`: one request to run, from `run()` until completed or failed, with its Celery options.

A closed asking keeps its outcome and result until the result backend has them. The unique key of an open job is in its
first asking, and is taken until that asking is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import advisory
from .statement import Reader, Statement, Transaction, first


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
    found = first(executor.run(_KEEP_KEY, id=job_id))
    return None if found is None else str(found.task_id)


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
