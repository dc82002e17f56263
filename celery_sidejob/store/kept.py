"""The messages of durable tasks, as people see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..model.status import Gate
from . import waiting
from .statement import Reader, Statement, first

STATUSES = ("queued", "scheduled", "gated", "running")
"""The statuses of an unfinished task; a doomed task that does not run has its doom instead.

Gated: it is due, and waits for a slot of its capacity pool, at the gate of its queue, or for a worker that can run it.
"""

_WAITS_FOR = f"""CASE WHEN m.locked_by IS NOT NULL OR m.doom IS NOT NULL THEN NULL
    WHEN m.gate = {Gate.POOL} THEN 'pool' WHEN m.gate = {Gate.WORKER} THEN 'no worker' WHEN m.due_at > now() THEN NULL
    WHEN q.paused_at IS NOT NULL THEN 'pause' WHEN q.rate_opens_at > now() THEN 'rate'
    WHEN m.gate = {Gate.QUEUE} THEN 'limit' END"""
"""The gate that holds a task back, as SQL; the same reasons as in `operations/waiting.py` for jobs."""
_STATUS = f"""CASE WHEN m.doom IS NOT NULL AND m.locked_by IS NULL THEN m.doom
    WHEN m.locked_by IS NOT NULL THEN 'running' WHEN {_WAITS_FOR} IS NOT NULL THEN 'gated'
    WHEN m.due_at > now() THEN 'scheduled' ELSE 'queued' END"""
_FROM = "FROM {messages} m LEFT JOIN {queues} q ON q.name = m.queue"


def _rows(messages: str) -> str:
    return f"""
SELECT m.task_id, m.task, m.queue, {_STATUS} AS status, {_WAITS_FOR} AS waits_for, m.due_at, m.declined_at,
  m.expires_at, m.published_at, m.locked_at, extract(epoch FROM now() - m.locked_at)::double precision AS runs_s,
  w.ident AS worker, m.losses, m.last_loss::text AS last_loss, m.doom, m.publication, m.unique_key
FROM {messages} m LEFT JOIN {{queues}} q ON q.name = m.queue LEFT JOIN {{workers}} w ON w.id = m.locked_by"""


_OF_TASK = Statement(f"{_rows('{messages}')} WHERE m.task_id = %(task_id)s AND m.body IS NOT NULL")


def of_task(executor: Reader, task_id: str) -> Any | None:
    """Read the message of a task that is not finished, without its body; None if there is none."""
    return first(executor.run(_OF_TASK, task_id=task_id))


_MATCHING = f"""m.body IS NOT NULL AND m.doom IS NULL AND (%(task)s::text IS NULL OR m.task = %(task)s)
  AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
  AND (%(statuses)s::text[] IS NULL OR {_STATUS} = ANY(%(statuses)s::text[]))"""
_WITH_TEXT = f"{_MATCHING} AND (%(text)s::text IS NULL OR strpos(m.publication, %(text)s) > 0)"


def _listing(messages: str, matching: str = _WITH_TEXT) -> Statement:
    return Statement(f"""{_rows(messages)} WHERE {matching}
ORDER BY m.locked_at, m.due_at, m.task_id LIMIT %(limit)s""")


LOOKED = 10_000
"""How many messages `look` goes through at once."""
_NEXT = "locked_by IS NULL AND task_id > %(after)s ORDER BY task_id"
_LIST = _listing("{messages}", _MATCHING)
_LIST_RUNNING = _listing("(SELECT * FROM {messages} WHERE locked_by IS NOT NULL)")
_LIST_NEXT = _listing(f"(SELECT * FROM {{messages}} WHERE {_NEXT} LIMIT {LOOKED})")
_LIST_OF_QUEUE = _listing(
    f"(SELECT * FROM {{messages}} WHERE queue = %(queue)s ORDER BY queue, next_check_at LIMIT {waiting.SHORT})"
)
_REACH = Statement(f"SELECT task_id FROM {{messages}} WHERE {_NEXT} OFFSET {LOOKED - 1} LIMIT 1")
_PAGE = Statement(f"""
SELECT m.task_id {_FROM} WHERE m.task_id > %(after)s AND {_MATCHING} ORDER BY m.task_id LIMIT %(limit)s""")
_COUNT = Statement(f"SELECT {_STATUS} AS status, count(*) AS tasks {_FROM} WHERE {_MATCHING} GROUP BY 1")


def list_(
    executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None, limit: int
) -> Sequence[Any]:
    """Read the tasks that match, as `of_task` does: the longest running first, then the first due; reads all."""
    return executor.run(_LIST, task=task, queue=queue, statuses=statuses, limit=limit)


def look(
    executor: Reader, *, queue: str | None, after: str, limit: int, **which: Any
) -> tuple[Sequence[Any], str | None]:
    """Read up to `limit` of the tasks that match, in the order of `list_`, among the next `LOOKED` messages by task id.

    Returns also the task id at which to go on; None at the end. All running tasks come with the first messages, and
    the tasks of a short queue at once. `text`: a part of the publication.
    """
    given = {**which, "queue": queue, "limit": limit}
    if queue is not None and waiting.is_short(executor, queue):
        return executor.run(_LIST_OF_QUEUE, **given), None
    running = [] if after else executor.run(_LIST_RUNNING, **given)
    if which["statuses"] == ["running"]:
        return running, None
    reach = first(executor.run(_REACH, after=after))
    rows = executor.run(_LIST_NEXT, **given, after=after)
    return [*running, *rows][:limit], reach and reach.task_id


def page(
    executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None, after: str, limit: int
) -> list[str]:
    """Read the ids of the next tasks that match, are not finished and were not revoked; reads along all messages."""
    found = executor.run(_PAGE, task=task, queue=queue, statuses=statuses, after=after, limit=limit)
    return [row.task_id for row in found]


def count(executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None) -> dict[str, int]:
    """Count the tasks that `page` reads by their status; reads all messages."""
    return {row.status: row.tasks for row in executor.run(_COUNT, task=task, queue=queue, statuses=statuses)}
