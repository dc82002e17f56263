"""Rows as tests ask for them: those whose run could begin now, and those of durable tasks that are not done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..statement import Reader, Statement

_DUE = Statement("""
SELECT m.task_id, m.job_id, m.for_run, m.queue, coalesce(m.task, j.task) AS task, m.publication, m.body, m.generation,
  m.expires_at
FROM {messages} m LEFT JOIN {jobs} j ON j.id = m.job_id
WHERE m.due_at <= now() AND m.locked_by IS NULL AND m.doom IS NULL AND (m.job_id IS NOT NULL OR m.body IS NOT NULL)
  AND coalesce(m.job_id = %(job_id)s::bigint, true)
  AND NOT EXISTS (SELECT FROM {queues} q WHERE q.name = m.queue AND (q.paused_at IS NOT NULL OR q.rate_opens_at > now()
    OR q.run_limit <= (SELECT count(*) FROM {messages} b WHERE b.queue = q.name AND b.locked_by IS NOT NULL)
    OR q.key_limit <= (SELECT count(*) FROM {messages} b
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
