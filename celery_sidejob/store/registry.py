"""Rows of `registry` and `meta`: tasks that workers serve, and the schema's owner."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from .statement import Autocommit, Reader, Statement, Transaction, first

_SERVE = Statement("""
WITH r AS (SELECT * FROM json_to_recordset(%(rows)s::json) AS r(task text, queue text, options text)),
served AS (
  INSERT INTO {registry} (task, queue, options)
  SELECT r.task, r.queue, r.options::json FROM r ORDER BY r.task, r.queue
  ON CONFLICT (task, queue) DO UPDATE SET options = excluded.options, seen_at = now())
SELECT DISTINCT r.queue FROM r LEFT JOIN {registry} before ON before.task = r.task AND before.queue = r.queue
WHERE before.options::text IS DISTINCT FROM r.options ORDER BY r.queue""")


def serve(executor: Transaction, tasks: Iterable[dict[str, Any]]) -> list[str]:
    """Record this worker's sidejob tasks, {task, queue, options as JSON text}, and return the changed queues."""
    return [row.queue for row in executor.run(_SERVE, rows=json.dumps(list(tasks)))]


_OF_QUEUE = Statement("SELECT task, options::text AS options FROM {registry} WHERE queue = %(queue)s ORDER BY task")


def of_queue(executor: Reader, queue: str) -> dict[str, str]:
    """Read the registry of a queue, {task: options as JSON text}."""
    return {row.task: row.options for row in executor.run(_OF_QUEUE, queue=queue)}


_SERVED = Statement("""
SELECT task, queue, options::text AS options FROM {registry} WHERE task = %(task)s ORDER BY seen_at DESC LIMIT 1""")


def served(executor: Reader, task: str) -> Any | None:
    """Read how a task was last served, for a client that does not have its code."""
    return first(executor.run(_SERVED, task=task))


_NAMES = Statement("SELECT task, queue FROM {registry}")


def names(executor: Reader) -> Sequence[Any]:
    """Read each (task, queue) that workers have registered."""
    return executor.run(_NAMES)


UNSERVED_DAYS = 180

_FORGET_UNSERVED = Statement(f"""
DELETE FROM {{registry}} r
WHERE r.seen_at < now() - make_interval(days => {UNSERVED_DAYS})
  AND r.seen_at < (SELECT min(w.started_at) FROM {{workers}} w WHERE w.dead_at IS NULL) - interval '1 day'""")


def forget_unserved(connections: Autocommit) -> None:
    """Forget tasks not served for half a year, nor by any live worker; without live workers, forget none."""
    connections.run(_FORGET_UNSERVED)
