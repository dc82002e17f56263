"""The messages of ordinary durable tasks, as a person sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .outbox.arming import NEVER
from .statement import Reader, Statement, first

STATUSES = ("queued", "scheduled", "running")
"""Where a task is that is not finished; a doomed one that does not run has its doom instead."""

_STATUS = f"""CASE WHEN m.doom IS NOT NULL AND m.locked_by IS NULL THEN m.doom
    WHEN m.locked_by IS NOT NULL THEN 'running'
    WHEN m.due_at > now() AND m.due_at <> {NEVER} THEN 'scheduled' ELSE 'queued' END"""
_OF_TASK = Statement(f"""
SELECT m.task_id, m.task, m.queue, {_STATUS} AS status,
  CASE WHEN m.due_at <> {NEVER} THEN m.due_at END AS due_at, m.declined_at, m.expires_at,
  m.published_at, m.locked_at, w.ident AS worker, m.losses,
  m.last_loss::text AS last_loss, m.doom, m.publication, m.unique_key
FROM {{messages}} m LEFT JOIN {{workers}} w ON w.id = m.locked_by
WHERE m.task_id = %(task_id)s AND m.body IS NOT NULL""")


def of_task(executor: Reader, task_id: str) -> Any | None:
    """Read the message of a task that is not finished, without its body; None if there is none."""
    return first(executor.run(_OF_TASK, task_id=task_id))


_MATCHING = f"""m.body IS NOT NULL AND m.doom IS NULL AND (%(task)s::text IS NULL OR m.task = %(task)s)
  AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
  AND (%(statuses)s::text[] IS NULL OR {_STATUS} = ANY(%(statuses)s::text[]))"""
_PAGE = Statement(f"""
SELECT m.task_id FROM {{messages}} m WHERE m.task_id > %(after)s AND {_MATCHING} ORDER BY m.task_id LIMIT %(limit)s""")
_COUNT = Statement(f"SELECT {_STATUS} AS status, count(*) AS tasks FROM {{messages}} m WHERE {_MATCHING} GROUP BY 1")


def page(
    executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None, after: str, limit: int
) -> list[str]:
    """Read the ids of the next tasks that match, are not finished and were not revoked; walks along all messages."""
    found = executor.run(_PAGE, task=task, queue=queue, statuses=statuses, after=after, limit=limit)
    return [row.task_id for row in found]


def count(executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None) -> dict[str, int]:
    """Count the tasks that `page` reads by their status; reads all messages."""
    return {row.status: row.tasks for row in executor.run(_COUNT, task=task, queue=queue, statuses=statuses)}
