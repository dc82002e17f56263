"""What workers serve: rows of `registry`, the tasks of jobs with their options; rows of `served`, each worker's tasks.

Those of `served`, with the queues of each worker, are for people, and for one decision: a job is parked if no live
worker of its queue serves its task.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .outbox.arming import DUE
from .outbox.publishing import QUEUES
from .statement import Autocommit, Reader, Statement, Transaction, arrays, first

_REGISTER = Statement("""
WITH r AS (SELECT * FROM json_to_recordset(%(rows)s::json) AS r(task text, queue text, options text)),
served AS (
  INSERT INTO {registry} (task, queue, options)
  SELECT r.task, r.queue, r.options::json FROM r ORDER BY r.task, r.queue
  ON CONFLICT (task, queue) DO UPDATE SET options = excluded.options, seen_at = now())
SELECT DISTINCT r.queue FROM r LEFT JOIN {registry} before ON before.task = r.task AND before.queue = r.queue
WHERE before.options::text IS DISTINCT FROM r.options ORDER BY r.queue""")


def register(executor: Transaction, tasks: Iterable[dict[str, Any]]) -> list[str]:
    """Record this worker's sidejob tasks, {task, queue, options as JSON text}, and return the changed queues."""
    return [row.queue for row in executor.run(_REGISTER, rows=json.dumps(list(tasks)))]


_REGISTERED_IN = Statement(
    "SELECT task, options::text AS options FROM {registry} WHERE queue = %(queue)s ORDER BY task"
)


def registered_in(executor: Reader, queue: str) -> dict[str, str]:
    """Read the registry of a queue, {task: options as JSON text}."""
    return {row.task: row.options for row in executor.run(_REGISTERED_IN, queue=queue)}


_LAST_SERVED = Statement("""
SELECT task, queue, options::text AS options FROM {registry} WHERE task = %(task)s ORDER BY seen_at DESC LIMIT 1""")


def last_served(executor: Reader, task: str) -> Any | None:
    """Read how a task was last served, for a client that does not have its code."""
    return first(executor.run(_LAST_SERVED, task=task))


_REGISTERED = Statement("SELECT task, queue FROM {registry}")


def registered(executor: Reader) -> Sequence[Any]:
    """Read each (task, queue) that workers have registered."""
    return executor.run(_REGISTERED)


UNSERVED_DAYS = 180

_FORGET_UNSERVED = Statement(f"""
DELETE FROM {{registry}} r
WHERE r.seen_at < now() - make_interval(days => {UNSERVED_DAYS})
  AND r.seen_at < (SELECT min(w.started_at) FROM {{workers}} w WHERE w.dead_at IS NULL) - interval '1 day'""")


def forget_unserved(connections: Autocommit) -> None:
    """Forget tasks not served for half a year, nor by any live worker; without live workers, forget none."""
    connections.run(_FORGET_UNSERVED)


_NOTE_SERVED = Statement("""
INSERT INTO {served} (worker_id, queues, tasks, skew_s)
SELECT w.id, %(queues)s::text[], %(tasks)s::text[],
  extract(epoch FROM clock_timestamp())::double precision - %(clock)s::double precision
FROM (SELECT id FROM {workers} WHERE id = %(worker_id)s FOR KEY SHARE) w
ON CONFLICT (worker_id) DO UPDATE
  SET queues = excluded.queues, tasks = excluded.tasks, skew_s = excluded.skew_s""")


def note_served(executor: Transaction, worker_id: int, *, queues: Iterable[str], tasks: Iterable[str]) -> None:
    """Record the queues from which a worker takes messages, the tasks it knows, and the time by its clock.

    Records nothing for a worker that is gone.
    """
    executor.run(
        _NOTE_SERVED, worker_id=worker_id, queues=sorted(set(queues)), tasks=sorted(set(tasks)), clock=time.time()
    )


_WORKERS = Statement("""
SELECT q.queue, count(*) AS workers FROM {served} s JOIN {workers} w ON w.id = s.worker_id
  CROSS JOIN LATERAL unnest(s.queues) AS q(queue)
WHERE w.dead_at IS NULL AND w.id <> ALL(%(silent)s::bigint[]) GROUP BY q.queue""")


def workers_of_queues(executor: Reader, silent: Collection[int]) -> dict[str, int]:
    """Read how many live workers serve each queue, without those that are `silent` (`workers.silent`)."""
    return {row.queue: row.workers for row in executor.run(_WORKERS, silent=list(silent))}


_SERVES = Statement("""
SELECT EXISTS (
  SELECT FROM {served} s JOIN {workers} w ON w.id = s.worker_id
  WHERE w.dead_at IS NULL AND w.id <> ALL(%(silent)s::bigint[])
    AND %(queue)s::text = ANY(s.queues) AND %(task)s::text = ANY(s.tasks)) AS found""")


def serves(executor: Reader, task: str, queue: str, silent: Collection[int]) -> bool:
    """Tell whether a live worker of a queue knows a task; `silent` workers (`workers.silent`) do not count."""
    return bool(executor.run(_SERVES, task=task, queue=queue, silent=list(silent))[0].found)


_SKEWED = Statement("""
SELECT w.ident, s.skew_s FROM {served} s JOIN {workers} w ON w.id = s.worker_id
WHERE w.dead_at IS NULL AND abs(s.skew_s) > %(most_s)s ORDER BY w.id""")


def skewed(executor: Reader, most_s: float) -> Sequence[Any]:
    """Read the live workers whose clock differs from the database's by more than this, and by how much."""
    return executor.run(_SKEWED, most_s=most_s)


_NOTE_STAND = Statement("""
UPDATE {served} SET stood_at = now() - make_interval(secs => %(ago_s)s), stood = %(where)s
WHERE worker_id = %(worker_id)s""")


def note_stand(executor: Transaction, worker_id: int, *, where: str, ago_s: float) -> None:
    """Record that the event loop of a worker stood still, where its code was, and how many seconds ago."""
    executor.run(_NOTE_STAND, worker_id=worker_id, where=where, ago_s=ago_s)


_STOOD = Statement("""
SELECT w.ident, s.stood, extract(epoch FROM now() - s.stood_at)::double precision AS ago_s
FROM {served} s JOIN {workers} w ON w.id = s.worker_id
WHERE w.dead_at IS NULL AND s.stood_at > now() - make_interval(secs => %(within_s)s) ORDER BY s.stood_at DESC""")


def stood(executor: Reader, *, within_s: float) -> Sequence[Any]:
    """Read the live workers whose event loop stood still lately, the latest first: (ident, stood, ago_s)."""
    return executor.run(_STOOD, within_s=within_s)


_UNANNOUNCED = Statement("""
SELECT w.id, w.ident FROM {workers} w
WHERE w.dead_at IS NULL AND w.id <> ALL(%(silent)s::bigint[])
  AND NOT EXISTS (SELECT FROM {served} s WHERE s.worker_id = w.id) ORDER BY w.id""")


def unannounced(executor: Reader, silent: Collection[int]) -> Sequence[Any]:
    """Read the live workers that have not recorded what they serve, because they are just starting.

    Workers that are `silent` (`workers.silent`) do not count.
    """
    return executor.run(_UNANNOUNCED, silent=list(silent))


PER_QUEUE = 500
MOST = 5000
"""The most messages, of one queue and of all, whose tasks are read."""

_DUE = Statement(f"""{QUEUES}
SELECT coalesce(m.task, (SELECT j.task FROM {{jobs}} j WHERE j.id = m.job_id)) AS task, m.queue,
  count(m.job_id) AS jobs, count(*) FILTER (WHERE m.due_at < now() - make_interval(secs => %(for_s)s)) AS runs
FROM (
  SELECT m.task, m.job_id, m.queue, m.due_at FROM q CROSS JOIN LATERAL (
    SELECT * FROM {{messages}} m WHERE m.queue = q.queue ORDER BY m.next_check_at LIMIT {PER_QUEUE}) m
  WHERE m.locked_by IS NULL AND m.doom IS NULL AND {DUE} AND (m.job_id IS NOT NULL OR m.body IS NOT NULL)
  LIMIT {MOST}) m
GROUP BY 1, 2""")


def due(executor: Reader, *, for_s: float) -> Sequence[Any]:
    """Read each (task, queue) with due runs that no worker has begun, and how many `runs` have been due for so long.

    `jobs` counts the runs of jobs among them, also those due for a shorter time. The first messages of each queue are
    read, in the order of their next checks. Each job's task is found by its key, because a join would read all jobs.
    """
    return executor.run(_DUE, for_s=for_s)


_NEVER_SERVED = Statement("""
SELECT t.task FROM unnest(%(tasks)s::text[]) AS t(task)
WHERE NOT EXISTS (SELECT FROM {registry} r WHERE r.task = t.task)""")


def never_served(executor: Reader, tasks: Iterable[str]) -> set[str]:
    """Read which of these tasks no worker has ever served."""
    return {row.task for row in executor.run(_NEVER_SERVED, tasks=list(tasks))}


_UNSERVED = Statement("""
SELECT due.task, due.queue, due.runs FROM unnest(%(task)s::text[], %(queue)s::text[], %(runs)s::bigint[])
  AS due(task, queue, runs)
WHERE due.runs > 0 AND (
    SELECT NOT bool_or(due.task = ANY(s.tasks)) FROM {served} s JOIN {workers} w ON w.id = s.worker_id
    WHERE due.queue = ANY(s.queues) AND w.dead_at IS NULL AND w.id <> ALL(%(silent)s::bigint[]))
ORDER BY 3 DESC, 1, 2""")


def unserved(executor: Reader, rows: Sequence[Any], silent: Collection[int]) -> Sequence[Any]:
    """Return the rows of `due` that belong to queues whose live workers do not know the task.

    `due` may have read them in another store: workers record only in the primary what they serve in all stores. Workers
    that are `silent` (`workers.silent`) do not count. Queues without a live worker are skipped.
    """
    return executor.run(_UNSERVED, **arrays(rows, "task", "queue", "runs"), silent=list(silent))
