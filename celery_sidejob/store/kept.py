"""The messages of ordinary durable tasks, as a person sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .outbox.arming import AT_GATE, IN_POOL, NEVER, WITHOUT_SLOT
from .statement import Reader, Statement, first

STATUSES = ("queued", "scheduled", "gated", "running")
"""Where a task is that is not finished; a doomed one that does not run has its doom instead.

Gated: it is due, and waits for a slot of its capacity pool, at the gate of its queue, or for a worker that can run it.
"""

_WAITS_FOR = f"""CASE WHEN m.locked_by IS NOT NULL OR m.doom IS NOT NULL THEN NULL
    WHEN {IN_POOL} THEN 'pool' WHEN m.due_at = {NEVER} THEN 'no worker' WHEN m.due_at > now() THEN NULL
    WHEN q.paused_at IS NOT NULL THEN 'pause' WHEN q.rate_opens_at > now() THEN 'rate'
    WHEN m.next_check_at >= {AT_GATE} THEN 'limit' END"""
"""Which gate holds a task back, as SQL; those of `operations/waiting.py` for jobs."""
_STATUS = f"""CASE WHEN m.doom IS NOT NULL AND m.locked_by IS NULL THEN m.doom
    WHEN m.locked_by IS NOT NULL THEN 'running' WHEN {_WAITS_FOR} IS NOT NULL THEN 'gated'
    WHEN m.due_at > now() THEN 'scheduled' ELSE 'queued' END"""
_FROM = "FROM {messages} m LEFT JOIN {queues} q ON q.name = m.queue"
_DUE_AT = f"CASE WHEN {IN_POOL} THEN m.due_at - {WITHOUT_SLOT} WHEN m.due_at <> {NEVER} THEN m.due_at END"
_COLUMNS = f"""
SELECT m.task_id, m.task, m.queue, {_STATUS} AS status, {_WAITS_FOR} AS waits_for, {_DUE_AT} AS due_at, m.declined_at,
  m.expires_at, m.published_at, m.locked_at, extract(epoch FROM now() - m.locked_at)::double precision AS runs_s,
  w.ident AS worker, m.losses, m.last_loss::text AS last_loss, m.doom, m.publication, m.unique_key
{_FROM} LEFT JOIN {{workers}} w ON w.id = m.locked_by"""
_OF_TASK = Statement(f"{_COLUMNS} WHERE m.task_id = %(task_id)s AND m.body IS NOT NULL")


def of_task(executor: Reader, task_id: str) -> Any | None:
    """Read the message of a task that is not finished, without its body; None if there is none."""
    return first(executor.run(_OF_TASK, task_id=task_id))


_MATCHING = f"""m.body IS NOT NULL AND m.doom IS NULL AND (%(task)s::text IS NULL OR m.task = %(task)s)
  AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
  AND (%(statuses)s::text[] IS NULL OR {_STATUS} = ANY(%(statuses)s::text[]))"""
_LIST = Statement(f"""{_COLUMNS} WHERE {_MATCHING}
ORDER BY m.locked_at, {_DUE_AT}, m.task_id LIMIT %(limit)s""")
_PAGE = Statement(f"""
SELECT m.task_id {_FROM} WHERE m.task_id > %(after)s AND {_MATCHING} ORDER BY m.task_id LIMIT %(limit)s""")
_COUNT = Statement(f"SELECT {_STATUS} AS status, count(*) AS tasks {_FROM} WHERE {_MATCHING} GROUP BY 1")


def list_(
    executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None, limit: int
) -> Sequence[Any]:
    """Read the tasks that match, as `of_task` does: what runs for the longest, then what was due first; reads all."""
    return executor.run(_LIST, task=task, queue=queue, statuses=statuses, limit=limit)


def page(
    executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None, after: str, limit: int
) -> list[str]:
    """Read the ids of the next tasks that match, are not finished and were not revoked; walks along all messages."""
    found = executor.run(_PAGE, task=task, queue=queue, statuses=statuses, after=after, limit=limit)
    return [row.task_id for row in found]


def count(executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None) -> dict[str, int]:
    """Count the tasks that `page` reads by their status; reads all messages."""
    return {row.status: row.tasks for row in executor.run(_COUNT, task=task, queue=queue, statuses=statuses)}
