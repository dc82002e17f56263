"""What waits, and why.

How many messages each queue has, by the reason for their wait: counted, or estimated for long queues. Why jobs do not
run: the conditions of the gate (`outbox/arming.py`), read for some jobs. And the messages of durable tasks, as people
see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..model.status import Gate
from . import stats
from .asks import IS_TIMER
from .outbox.arming import DUE, OPENS_AT, OWED
from .outbox.publishing import QUEUES
from .statement import Reader, Statement, first

COUNTED = 2000
"""The most messages of a queue that are counted one by one if there are too many to count all."""

_UNPUBLISHED = f"waits AND due_at <= now() AND gate = {Gate.OPEN} AND published_at IS NULL AND declined_at IS NULL"
_COUNTS = f"""count(*) AS messages, count(*) FILTER (WHERE locked_by IS NOT NULL) AS running,
  count(*) FILTER (WHERE waits AND {DUE}) AS depth,
  count(*) FILTER (WHERE waits AND due_at > now() AND {OWED} AND generation IS DISTINCT FROM 1) AS delayed,
  count(*) FILTER (WHERE waits AND due_at > now() AND {OWED} AND generation = 1) AS scheduled,
  count(*) FILTER (WHERE waits AND gate = {Gate.WORKER}) AS parked,
  count(*) FILTER (WHERE waits AND due_at <= now() + make_interval(secs => %(horizon_s)s) AND {OWED}) AS soon,
  count(*) FILTER (WHERE waits AND due_at > now() + make_interval(secs => %(horizon_s)s) AND {OWED}
    ) AS later,
  min(due_at) FILTER (WHERE waits AND due_at > now() + make_interval(secs => %(horizon_s)s) AND {OWED}
    ) AS later_from,
  count(*) FILTER (WHERE {_UNPUBLISHED}) AS unpublished,
  extract(epoch FROM now() - min(due_at) FILTER (WHERE waits AND {DUE}))::double precision AS oldest_due_s,
  extract(epoch FROM now() - min(due_at) FILTER (WHERE {_UNPUBLISHED}))::double precision AS oldest_unpublished_s,
  false AS is_estimated"""

_OF_A_SHARE = Statement(f"""
SELECT queue, {_COUNTS}
FROM (SELECT *, locked_by IS NULL AS waits FROM {{messages}} {stats.SAMPLE}) m
GROUP BY queue ORDER BY queue""")
_OF_EACH_QUEUE = Statement(f"""{QUEUES}
SELECT q.queue, x.* FROM q CROSS JOIN LATERAL (
  SELECT {_COUNTS} FROM (
    SELECT *, locked_by IS NULL AS waits FROM {{messages}} m
    WHERE m.queue = q.queue ORDER BY m.next_check_at LIMIT {COUNTED}) m) x
WHERE q.queue IS NOT NULL ORDER BY q.queue""")
_RUNNING = Statement("SELECT queue, count(*) AS running FROM {messages} WHERE locked_by IS NOT NULL GROUP BY queue")


NUMBERS = ("messages", "depth", "delayed", "scheduled", "parked", "soon", "later", "unpublished")
AGES = ("oldest_due_s", "oldest_unpublished_s")


def depths(executor: Reader, *, horizon_s: float = 0.0) -> Sequence[Any]:
    """Count the messages of each queue; in a large table, estimate queues with `COUNTED` and more from a sample.

    Of the rows `messages` is the sum of: held by a run (`running`), due (`depth`), waiting for a backoff or a rate
    (`delayed`), waiting for their first time (`scheduled`), or `parked`. A message that waits at the gate of a managed
    queue, or to be sent again because a worker has declined it, is due, and not `unpublished`. `soon` counts messages
    due within the horizon, `later` the others, the first of which is due at `later_from`. If it `is_estimated`, all
    numbers except `running` are estimates. The ages are `oldest_due_s` and `oldest_unpublished_s`.
    """
    share = stats.share(executor, "messages")
    if share.is_all:
        return executor.run(_OF_A_SHARE, percent=100.0, horizon_s=horizon_s)
    counted = executor.run(_OF_EACH_QUEUE, horizon_s=horizon_s)
    running = {row.queue: row.running for row in executor.run(_RUNNING)}
    sample = {row.queue: row._asdict() for row in executor.run(_OF_A_SHARE, percent=share.percent, horizon_s=horizon_s)}
    return [
        row if row.messages < COUNTED else _estimated(row, sample.get(row.queue, {}), running.get(row.queue, 0), share)
        for row in counted
    ]


def _estimated(counted: Any, sample: Mapping[str, Any], running: int, share: stats.Share) -> Any:
    """Return a queue's numbers from the sample; each is at least the number counted."""
    seen: dict[str, Any] = {name: max(getattr(counted, name), share.whole(sample.get(name, 0))) for name in NUMBERS}
    seen |= {
        name: max((age for age in (getattr(counted, name), sample.get(name)) if age is not None), default=None)
        for name in AGES
    }
    firsts = [at for at in (counted.later_from, sample.get("later_from")) if at is not None]
    return counted._replace(**seen, later_from=min(firsts, default=None), running=running, is_estimated=True)


_IS_ANY_SOON = Statement(f"""
SELECT EXISTS (SELECT FROM {{messages}} m WHERE queue = %(queue)s AND locked_by IS NULL AND {OWED}
  AND due_at <= now() + make_interval(secs => %(horizon_s)s)) AS found""")


def is_any_soon(executor: Reader, queue: str, *, horizon_s: float) -> bool:
    """Tell whether a message of a queue is due within the horizon; reads the whole queue if none is."""
    return bool(executor.run(_IS_ANY_SOON, queue=queue, horizon_s=horizon_s)[0].found)


SHORT = 10_000
"""The most messages of a queue that are all read to find some of them."""
_IS_SHORT = Statement(f"""
SELECT count(*) <= {SHORT} AS short FROM (
  SELECT FROM {{messages}} WHERE queue = %(queue)s ORDER BY queue, next_check_at LIMIT {SHORT} + 1) few""")


def is_short(executor: Reader, queue: str) -> bool:
    """Tell whether a queue has at most `SHORT` messages."""
    return bool(executor.run(_IS_SHORT, queue=queue)[0].short)


_DELAYED = f"""(m.due_at > now() AND (m.gate = {Gate.POOL} OR {OWED}
    AND (m.due_at > {OPENS_AT}) IS NOT FALSE))"""
"""Whether a message waits for its own time, as SQL: the backoff of a retry, or the delay of a stage (`then`)."""

_CONDITIONS = Statement(f"""
SELECT j.id, j.task, m.queue, {DUE} AS is_due,
  m.gate = {Gate.WORKER} AS is_parked,
  {DUE} AND q.paused_at IS NOT NULL AS waits_for_pause,
  {DUE} AND ((SELECT count(*) FROM {{messages}} h
      WHERE h.queue || '' = m.queue AND h.locked_by IS NOT NULL) >= q.run_limit
    OR m.limit_key IS NOT NULL AND (SELECT count(*) FROM {{messages}} h
      WHERE h.queue || '' = m.queue AND h.locked_by IS NOT NULL AND h.limit_key = m.limit_key) >= q.key_limit
    ) AS waits_for_limit,
  m.due_at > now() AND {OPENS_AT} > now() OR {DUE} AND q.rate_opens_at > now() AS waits_for_rate,
  m.gate = {Gate.POOL} AND m.due_at <= now() AS waits_for_pool,
  {_DELAYED} AND j.retries > 0 AS waits_for_retry,
  ({_DELAYED} AND j.retries = 0 OR m.job_id IS NULL AND j.unit_no IS NULL
    AND EXISTS (SELECT FROM {{timers}} t WHERE t.job_id = j.id AND t.due_at > now() AND {IS_TIMER})) IS TRUE
    AS waits_for_timer,
  j.status = 'suspended' AND EXISTS (SELECT FROM {{port_waiters}} w WHERE w.job_id = j.id AND w.run_no = j.run_no)
    AND j.unit_no IS NULL AS waits_for_room,
  j.blocked IS TRUE AND j.unit_no IS NULL AND j.status = 'queued' AS waits_for_dependencies
FROM {{jobs}} j LEFT JOIN {{messages}} m ON m.job_id = j.id AND m.locked_by IS NULL
  LEFT JOIN {{queues}} q ON q.name = m.queue
WHERE j.id = ANY(%(job_ids)s::bigint[])""")


def conditions(executor: Reader, job_ids: Iterable[int]) -> Sequence[Any]:
    """Read why the next run of each job waits; a job that is gone is missing.

    Returns (id, task, queue, is_due, is_parked, waits_for_pause, waits_for_limit, waits_for_rate, waits_for_pool,
    waits_for_retry, waits_for_timer, waits_for_room, waits_for_dependencies).
    If no run is owed, or a run is in progress, they are None, except the last three.
    """
    return executor.run(_CONDITIONS, job_ids=list(job_ids))


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
"""How many messages `look_at_tasks` goes through at once."""
_NEXT = "locked_by IS NULL AND task_id > %(after)s ORDER BY task_id"
_LIST = _listing("{messages}", _MATCHING)
_LIST_RUNNING = _listing("(SELECT * FROM {messages} WHERE locked_by IS NOT NULL)")
_LIST_NEXT = _listing(f"(SELECT * FROM {{messages}} WHERE {_NEXT} LIMIT {LOOKED})")
_LIST_OF_QUEUE = _listing(
    f"(SELECT * FROM {{messages}} WHERE queue = %(queue)s ORDER BY queue, next_check_at LIMIT {SHORT})"
)
_REACH = Statement(f"SELECT task_id FROM {{messages}} WHERE {_NEXT} OFFSET {LOOKED - 1} LIMIT 1")
_PAGE = Statement(f"""
SELECT m.task_id {_FROM} WHERE m.task_id > %(after)s AND {_MATCHING} ORDER BY m.task_id LIMIT %(limit)s""")
_COUNT = Statement(f"SELECT {_STATUS} AS status, count(*) AS tasks {_FROM} WHERE {_MATCHING} GROUP BY 1")


def list_tasks(
    executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None, limit: int
) -> Sequence[Any]:
    """Read the tasks that match, as `of_task` does: the longest running first, then the first due; reads all."""
    return executor.run(_LIST, task=task, queue=queue, statuses=statuses, limit=limit)


def look_at_tasks(
    executor: Reader, *, queue: str | None, after: str, limit: int, **which: Any
) -> tuple[Sequence[Any], str | None]:
    """Read up to `limit` of the tasks that match, in the order of `list_tasks`, among the next `LOOKED` messages.

    The messages are in the order of their task ids. Returns also the task id at which to go on; None at the end. All
    running tasks come with the first messages, and the tasks of a short queue at once. `text`: a part of the
    publication.
    """
    given = {**which, "queue": queue, "limit": limit}
    if queue is not None and is_short(executor, queue):
        return executor.run(_LIST_OF_QUEUE, **given), None
    running = [] if after else executor.run(_LIST_RUNNING, **given)
    if which["statuses"] == ["running"]:
        return running, None
    reach = first(executor.run(_REACH, after=after))
    rows = executor.run(_LIST_NEXT, **given, after=after)
    return [*running, *rows][:limit], reach and reach.task_id


def page_of_tasks(
    executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None, after: str, limit: int
) -> list[str]:
    """Read the ids of the next tasks that match, are not finished and were not revoked; reads along all messages."""
    found = executor.run(_PAGE, task=task, queue=queue, statuses=statuses, after=after, limit=limit)
    return [row.task_id for row in found]


def count_tasks(
    executor: Reader, *, task: str | None, queue: str | None, statuses: Sequence[str] | None
) -> dict[str, int]:
    """Count the tasks that `page_of_tasks` reads by their status; reads all messages."""
    return {row.status: row.tasks for row in executor.run(_COUNT, task=task, queue=queue, statuses=statuses)}
