"""Rows of jobs, as they are read: the doorbell for the present or the next run. `arming.py` writes them.

And rows of continuations: a publication that follows an asking's end, removed once the broker has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...model.messages import CONTINUATION, Continuation
from ...model.names import storable
from ...model.status import Gate
from ..statement import Reader, Statement, Transaction, first, first_value
from .arming import DUE, OWED

_WAITING = Statement(f"""
SELECT m.task_id, m.job_id, m.for_run, m.queue, m.publication, j.task, j.priority, a.options::text AS options
FROM {{messages}} m JOIN {{jobs}} j ON j.id = m.job_id LEFT JOIN {{askings}} a ON a.task_id = m.task_id
WHERE m.job_id = ANY(%(job_ids)s::bigint[]) AND m.locked_by IS NULL AND {DUE}
  AND (m.published_at IS NULL OR NOT %(unpublished)s::boolean) ORDER BY m.job_id""")


def waiting(executor: Reader, job_ids: Iterable[int], *, unpublished: bool = False) -> Sequence[Any]:
    """Read the doorbells of those of these jobs whose run could begin now; optionally only the `unpublished` ones."""
    return executor.run(_WAITING, job_ids=list(job_ids), unpublished=unpublished)


_OF_JOB = Statement(f"""
SELECT m.task_id, m.for_run, m.queue, CASE WHEN {OWED} THEN m.due_at END AS due_at,
  m.gate = {Gate.WORKER} AS is_parked, m.published_at, m.locked_at,
  w.ident AS locked_by
FROM {{messages}} m LEFT JOIN {{workers}} w ON w.id = m.locked_by WHERE m.job_id = %(job_id)s""")


def of_job(executor: Reader, job_id: int) -> Any | None:
    """Read the row of a job's present or next run, with the worker that holds it.

    `due_at` is None while the run waits for no time, but for other jobs, a slot of a pool, or a worker.
    """
    return first(executor.run(_OF_JOB, job_id=job_id))


_PENDING = Statement("""
SELECT EXISTS (SELECT FROM {messages} m WHERE m.job_id = ANY(%(job_ids)s::bigint[]))
  OR EXISTS (SELECT FROM {timers} t WHERE t.job_id = ANY(%(job_ids)s::bigint[])) AS pending""")


def pending(executor: Reader, job_ids: Iterable[int]) -> bool:
    """Tell whether anything is still due for one of these jobs, now or later."""
    return bool(executor.run(_PENDING, job_ids=list(job_ids))[0].pending)


_DUE = Statement(f"""
SELECT m.task_id, m.job_id, m.for_run, m.queue, coalesce(m.task, j.task) AS task, m.publication, m.body, m.generation,
  m.expires_at
FROM {{messages}} m LEFT JOIN {{jobs}} j ON j.id = m.job_id
WHERE {DUE} AND m.locked_by IS NULL AND m.doom IS NULL AND (m.job_id IS NOT NULL OR m.body IS NOT NULL)
  AND coalesce(m.job_id = %(job_id)s::bigint, true)
  AND NOT EXISTS (SELECT FROM {{queues}} q WHERE q.name = m.queue AND (
    q.paused_at IS NOT NULL OR q.rate_opens_at > now()
    OR q.run_limit <= (SELECT count(*) FROM {{messages}} b WHERE b.queue = q.name AND b.locked_by IS NOT NULL)
    OR q.key_limit <= (SELECT count(*) FROM {{messages}} b
      WHERE b.queue = q.name AND b.locked_by IS NOT NULL AND b.limit_key = m.limit_key)))
ORDER BY m.rank DESC NULLS LAST, m.due_at, m.job_id, m.task_id LIMIT 100""")


def due(executor: Reader, job_id: int | None = None) -> Sequence[Any]:
    """Read rows of jobs, or of one job, and of durable tasks; a job's have no `body`.

    Those of a queue whose gate is closed are left out.
    """
    return executor.run(_DUE, job_id=job_id)


_DOOMED = Statement("SELECT task_id FROM {messages} WHERE doom IS NOT NULL AND due_at <= now() LIMIT 100")


def doomed(executor: Reader) -> Sequence[Any]:
    """Read the ids of durable tasks that were lost or revoked, and wait for the sweeper to bury them."""
    return executor.run(_DOOMED)


_UNDONE = Statement("""
SELECT task_id, task, queue, publication, body, generation, expires_at FROM {messages}
WHERE body IS NOT NULL AND doom IS NULL ORDER BY due_at, task_id LIMIT %(limit)s""")


def undone(executor: Reader, limit: int) -> Sequence[Any]:
    """Read messages of durable tasks that are not done, whenever they are due."""
    return executor.run(_UNDONE, limit=limit)


_KEEP_CONTINUATION = Statement("""
INSERT INTO {messages} (task_id, queue, publication, next_check_at, check_interval)
VALUES (%(key)s, %(queue)s, %(publication)s, now() + interval '2 s', make_interval(secs => %(check_interval_s)s))
ON CONFLICT (task_id) DO NOTHING""")


def keep_continuation(executor: Transaction, continuation: Continuation, *, check_interval_s: float) -> None:
    """Keep a publication that follows an asking's end until the broker has it."""
    row = {"key": continuation.key, "queue": continuation.queue, "publication": continuation.publication}
    executor.run(_KEEP_CONTINUATION, **row, check_interval_s=check_interval_s)


_REMOVE_CONTINUATIONS = Statement("DELETE FROM {messages} WHERE task_id = ANY(%(keys)s::text[]) AND job_id IS NULL")


def remove_continuations(executor: Transaction, keys: Iterable[str]) -> None:
    """Forget continuations that were published."""
    executor.run(_REMOVE_CONTINUATIONS, keys=list(keys))


_BURY_CONTINUATION = Statement("""
WITH gone AS (
  DELETE FROM {messages} WHERE task_id = %(key)s AND job_id IS NULL AND locked_by IS NULL RETURNING *)
INSERT INTO {dead} (task_id, task, queue, reason, error, payload)
SELECT %(task_id)s, %(task)s, queue, %(reason)s, %(error)s,
  pg_catalog.json_build_object('v', 1, 'continuation', publication)
FROM gone RETURNING id""")


def bury_continuation(executor: Transaction, continuation: Continuation, *, reason: str, error: str) -> int | None:
    """Move a continuation to the dead set; returns the entry's id, None if it is gone."""
    row = {"key": continuation.key, "task_id": continuation.task_id, "task": storable(continuation.task)}
    return first_value(executor.run(_BURY_CONTINUATION, **row, reason=reason, error=error), int)


_REVIVE_CONTINUATIONS = Statement(f"""
WITH gone AS (
  DELETE FROM {{dead}} d WHERE d.id = ANY(ARRAY(
      SELECT max(e.id) FROM {{dead}} e WHERE e.id = ANY(%(ids)s::bigint[]) AND e.job_id IS NULL
        AND e.payload->>'continuation' IS NOT NULL GROUP BY e.task_id))
    AND NOT EXISTS (SELECT FROM {{messages}} m WHERE m.task_id = '{CONTINUATION}' || d.task_id) RETURNING *)
INSERT INTO {{messages}} (task_id, queue, publication, next_check_at, check_interval)
SELECT '{CONTINUATION}' || task_id, queue, payload->>'continuation', now(),
  pg_catalog.make_interval(secs => %(check_interval_s)s) FROM gone RETURNING task_id""")


def revive_continuations(executor: Transaction, entry_ids: Sequence[int], *, check_interval_s: float) -> int:
    """Take continuations out of the dead set, for the sweeper to publish; returns their number.

    If several have one id, the newest is taken and the others stay: an id has only one row.
    """
    return len(executor.run(_REVIVE_CONTINUATIONS, ids=list(entry_ids), check_interval_s=check_interval_s))
