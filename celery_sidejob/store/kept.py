"""The message of an ordinary durable task, as a person sees it."""

from __future__ import annotations

from typing import Any

from .statement import Reader, Statement, first

_OF_TASK = Statement("""
SELECT m.task_id, m.task, m.queue, CASE WHEN m.doom IS NOT NULL AND m.locked_by IS NULL THEN m.doom
    WHEN m.locked_by IS NOT NULL THEN 'running' WHEN m.due_at > now() THEN 'scheduled' ELSE 'queued' END AS status,
  m.due_at, m.expires_at, m.published_at, m.locked_at, w.ident AS worker, m.losses,
  m.last_loss::text AS last_loss, m.doom, m.publication, m.unique_key
FROM {messages} m LEFT JOIN {workers} w ON w.id = m.locked_by
WHERE m.task_id = %(task_id)s AND m.body IS NOT NULL""")


def of_task(executor: Reader, task_id: str) -> Any | None:
    """Read the message of a task that is not finished, without its body; None if there is none."""
    return first(executor.run(_OF_TASK, task_id=task_id))
