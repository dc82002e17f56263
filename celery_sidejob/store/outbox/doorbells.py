"""Rows of jobs, as they are read: the doorbell for the present or the next run. `arming.py` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...model.gate import Gate
from ..statement import Reader, Statement, first
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
