"""Rows of `served_tasks`: which tasks each worker knows. Nothing is decided by them; a person is told by them.

A store that is one revision behind has no such table: what would be noted there is not, and nobody fails for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import revisions
from .statement import Executor, Statement

SINCE = "0005"

_SERVE = Statement(
    """
INSERT INTO {served_tasks} (worker_id, tasks)
SELECT w.id, %(tasks)s::text[] FROM (SELECT id FROM {workers} WHERE id = %(worker_id)s FOR KEY SHARE) w
ON CONFLICT (worker_id) DO UPDATE SET tasks = excluded.tasks""",
    since=SINCE,
)


def serve(executor: Executor, worker_id: int, tasks: Iterable[str]) -> None:
    """Say which tasks a worker knows; one that is gone says nothing."""
    executor.run(_SERVE, worker_id=worker_id, tasks=sorted(set(tasks)))


_UNSERVED = Statement(
    """
SELECT due.task, due.queue, count(*) AS runs FROM (
  SELECT coalesce(m.task, j.task) AS task, m.queue FROM (
    SELECT task, job_id, queue FROM {messages}
    WHERE locked_by IS NULL AND doom IS NULL AND due_at < now() - make_interval(secs => %(for_s)s)
      AND (job_id IS NOT NULL OR body IS NOT NULL) LIMIT %(limit)s) m
  LEFT JOIN {jobs} j ON j.id = m.job_id) due
WHERE EXISTS (
    SELECT FROM {served_queues} q JOIN {workers} w ON w.id = q.worker_id
    WHERE q.queue = due.queue AND w.dead_at IS NULL)
  AND NOT EXISTS (
    SELECT FROM {served_queues} q JOIN {workers} w ON w.id = q.worker_id
      LEFT JOIN {served_tasks} t ON t.worker_id = w.id
    WHERE q.queue = due.queue AND w.dead_at IS NULL AND (t.worker_id IS NULL OR due.task = ANY(t.tasks)))
GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2""",
    since=SINCE,
)


def unserved(executor: Executor, *, for_s: float, limit: int = 10_000) -> Sequence[Any]:
    """Read of which tasks runs have been due for so long in queues whose live workers do not know them.

    A worker that has not said what it knows, because it is of an older version, may know it. A queue without a live
    worker is not asked about here.
    """
    return executor.run(_UNSERVED, for_s=for_s, limit=limit)


def fits(executor: Executor) -> bool:
    """Tell whether the schema has the table."""
    return (revisions.read(executor) or revisions.FIRST) >= SINCE
