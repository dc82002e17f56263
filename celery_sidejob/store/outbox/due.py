"""Rows whose run could begin now, in the order in which they are due: for tests, which run them without a broker."""

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
ORDER BY m.due_at, m.job_id, m.task_id LIMIT 100""")


def due(executor: Reader, job_id: int | None = None) -> Sequence[Any]:
    """Read rows of jobs, or of one job, and of durable tasks; a job's have no `body`."""
    return executor.run(_DUE, job_id=job_id)
