"""Rows of `served_tasks`: which tasks each worker knows. Nothing is decided by them; a person is told by them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .statement import Statement, Transaction

_SERVE = Statement("""
INSERT INTO {served_tasks} (worker_id, tasks)
SELECT w.id, %(tasks)s::text[] FROM (SELECT id FROM {workers} WHERE id = %(worker_id)s FOR KEY SHARE) w
ON CONFLICT (worker_id) DO UPDATE SET tasks = excluded.tasks""")


def serve(executor: Transaction, worker_id: int, tasks: Iterable[str]) -> None:
    """Say which tasks a worker knows; one that is gone says nothing."""
    executor.run(_SERVE, worker_id=worker_id, tasks=sorted(set(tasks)))


_DUE = Statement("""
SELECT coalesce(m.task, (SELECT j.task FROM {jobs} j WHERE j.id = m.job_id)) AS task, m.queue, count(*) AS runs FROM (
  SELECT task, job_id, queue FROM {messages}
  WHERE locked_by IS NULL AND doom IS NULL AND due_at < now() - make_interval(secs => %(for_s)s)
    AND (job_id IS NOT NULL OR body IS NOT NULL) LIMIT %(limit)s) m
GROUP BY 1, 2""")


def due(executor: Transaction, *, for_s: float, limit: int = 5_000) -> Sequence[Any]:
    """Read of which (task, queue) how many `runs` have been due for so long, and no worker has begun them.

    Reads `messages`, which holds what is not finished, until so many are found; each job's task by its key, since a
    join would read all jobs for a long backlog.
    """
    return executor.run(_DUE, for_s=for_s, limit=limit)


_UNSERVED = Statement("""
SELECT due.task, due.queue, due.runs FROM unnest(%(tasks)s::text[], %(queues)s::text[], %(runs)s::bigint[])
  AS due(task, queue, runs)
WHERE EXISTS (
    SELECT FROM {served_queues} q JOIN {workers} w ON w.id = q.worker_id
    WHERE q.queue = due.queue AND w.dead_at IS NULL AND w.id <> ALL(%(silent)s::bigint[]))
  AND NOT EXISTS (
    SELECT FROM {served_queues} q JOIN {workers} w ON w.id = q.worker_id
      LEFT JOIN {served_tasks} t ON t.worker_id = w.id
    WHERE q.queue = due.queue AND w.dead_at IS NULL AND w.id <> ALL(%(silent)s::bigint[])
      AND (t.worker_id IS NULL OR due.task = ANY(t.tasks)))
ORDER BY 3 DESC, 1, 2""")


def unserved(executor: Transaction, rows: Sequence[Any], silent: Collection[int]) -> Sequence[Any]:
    """Read which of the rows that `due` returned are of queues whose live workers do not know the task.

    `due` may have read them in another store: workers say in the primary alone what they serve, in all stores. A worker
    that has not said yet what it knows may know it; one that is `silent` (`workers.silent`) is not asked. A queue
    without a live worker is not asked about here.
    """
    return executor.run(
        _UNSERVED, tasks=[row.task for row in rows], queues=[row.queue for row in rows],
        runs=[row.runs for row in rows], silent=list(silent),
    )  # fmt: skip
