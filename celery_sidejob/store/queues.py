"""Rows of `queues`: the settings of managed queues, by a person or from the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..model.durable import Key
from ..model.queue import QueueSettings, Rate
from ..model.status import Gate
from .asks import IS_TIMER
from .outbox.arming import DUE, LATER, MANAGED, OWED
from .statement import Autocommit, Reader, Statement, Transaction, first, first_value

_COLUMNS = """q.name, q.ordered, q.run_limit, q.key_limit, q.rate_interval_s, q.rate_burst, q.paused_at, q.pause_reason,
  q.declared::text AS declared"""
_NAMES = Statement("SELECT q.name FROM {queues} q ORDER BY q.name")
_READ = Statement(f"""
SELECT {_COLUMNS} FROM {{queues}} q WHERE q.name = ANY(%(names)s::text[]) OR %(names)s::text[] IS NULL
ORDER BY q.name""")


@dataclass(frozen=True, slots=True)
class ManagedQueue:
    """A managed queue's row."""

    name: str
    settings: QueueSettings
    paused_at: datetime | None
    pause_reason: str | None
    declared: Mapping[str, Any] | None
    """Its last applied declaration."""


def names(executor: Reader) -> list[str]:
    """Read the names of the managed queues."""
    return [row.name for row in executor.run(_NAMES)]


def read(executor: Reader, queues: Iterable[str] | None = None) -> dict[str, ManagedQueue]:
    """Read managed queues by their names: those of these `queues`, or all."""
    given = None if queues is None else list(queues)
    return {row.name: _of_row(row) for row in executor.run(_READ, names=given)}


def _of_row(row: Any) -> ManagedQueue:
    rate = None if row.rate_interval_s is None else Rate(row.rate_interval_s, row.rate_burst)
    settings = QueueSettings(row.ordered, row.run_limit, row.key_limit, rate)
    declared = None if row.declared is None else json.loads(row.declared)
    return ManagedQueue(row.name, settings, row.paused_at, row.pause_reason, declared)


_MANAGE = Statement("INSERT INTO {queues} (name) VALUES (%(name)s) ON CONFLICT (name) DO NOTHING")
_LOCK = Statement(f"SELECT {_COLUMNS} FROM {{queues}} q WHERE q.name = %(name)s FOR UPDATE")
_SET = Statement("""
UPDATE {queues} SET ordered = %(ordered)s, run_limit = %(limit)s, key_limit = %(key_limit)s,
  rate_opens_at = CASE WHEN rate_interval_s = %(interval_s)s::double precision THEN rate_opens_at END,
  rate_interval_s = %(interval_s)s::double precision, rate_burst = %(burst)s,
  declared = coalesce(%(declared)s::json, declared)
WHERE name = %(name)s""")


def lock(executor: Transaction, name: str) -> ManagedQueue:
    """Make a queue managed, lock its row against claims and other changes, and return it."""
    executor.run(_MANAGE, name=name)
    return _of_row(executor.run(_LOCK, name=name)[0])


def set_(executor: Transaction, name: str, settings: QueueSettings, *, declared: Mapping[str, Any] | None) -> None:
    """Change the settings of a locked queue; another rate begins with a full bucket."""
    rate = settings.rate
    executor.run(
        _SET,
        name=name,
        ordered=settings.ordered,
        limit=settings.limit,
        key_limit=settings.limit_per_key,
        interval_s=None if rate is None else rate.interval_s,
        burst=None if rate is None else rate.burst,
        declared=None if declared is None else json.dumps(declared),
    )


_PAUSE = Statement("""
INSERT INTO {queues} AS q (name, paused_at, pause_reason) VALUES (%(name)s, now(), %(reason)s)
ON CONFLICT (name) DO UPDATE SET paused_at = coalesce(q.paused_at, now()), pause_reason = excluded.pause_reason""")
_RESUME = Statement("UPDATE {queues} SET paused_at = NULL, pause_reason = NULL WHERE name = %(name)s")


def pause(executor: Transaction, name: str, reason: str | None) -> None:
    """Close the gate of a queue; for a paused queue only the reason changes."""
    executor.run(_PAUSE, name=name, reason=reason)


def resume(executor: Transaction, name: str) -> None:
    """Open the gate of a paused queue."""
    executor.run(_RESUME, name=name)


_UNMANAGE = Statement("DELETE FROM {queues} WHERE name = %(name)s RETURNING name")


def unmanage(executor: Transaction, name: str) -> bool:
    """Make a queue unmanaged; waits for transactions that have locked it. Returns whether it was managed."""
    return bool(executor.run(_UNMANAGE, name=name))


_PAUSED = Statement(f"""
SELECT q.name, q.pause_reason, extract(epoch FROM now() - q.paused_at)::double precision AS paused_s,
  EXISTS (SELECT FROM {{messages}} m WHERE m.queue = q.name AND m.locked_by IS NULL AND {DUE}) AS waiting
FROM {{queues}} q WHERE q.paused_at < now() - make_interval(secs => %(for_s)s) ORDER BY q.name""")


def paused(executor: Reader, *, for_s: float) -> Sequence[Any]:
    """Read the queues that have been paused for at least `for_s`: (name, pause_reason, paused_s, waiting)."""
    return executor.run(_PAUSED, for_s=for_s)


RANKED_TOGETHER = 1000

_UNRANKED = Statement("""
SELECT q.name FROM {queues} q WHERE NOT q.ranked AND (q.name = %(name)s OR %(name)s::text IS NULL) ORDER BY q.name""")
_RANK = Statement(f"""
WITH page AS MATERIALIZED (
  SELECT m.task_id, m.job_id FROM {{messages}} m
  WHERE m.job_id > %(after)s::bigint AND m.queue = %(name)s AND m.rank IS NULL AND m.locked_by IS NULL
  ORDER BY m.job_id LIMIT {RANKED_TOGETHER}),
free AS MATERIALIZED (
  SELECT m.task_id, m.job_id FROM {{messages}} m
  WHERE m.task_id = ANY(ARRAY(SELECT page.task_id FROM page)) AND m.rank IS NULL AND m.locked_by IS NULL
  FOR UPDATE OF m SKIP LOCKED),
ranked AS (
  UPDATE {{messages}} m SET rank = coalesce(j.priority, 0::smallint)
  FROM free JOIN {{jobs}} j ON j.id = free.job_id WHERE m.task_id = free.task_id RETURNING m.job_id)
SELECT max(page.job_id) AS last, count(*) = {RANKED_TOGETHER} AS goes_on,
  count(*) > (SELECT count(*) FROM ranked) AS has_missed
FROM page""")
_HAS_RANKED = Statement("UPDATE {queues} SET ranked = true WHERE name = %(name)s")


def unranked(executor: Reader, name: str | None = None) -> list[str]:
    """Read which queues, or whether this queue, may have messages that are older than their management."""
    return [row.name for row in executor.run(_UNRANKED, name=name)]


def rank(executor: Transaction, name: str, *, after: int) -> Any:
    """Rank a page of messages of jobs that are older than the management of their queue: (last, goes_on, has_missed).

    `has_missed`: other transactions had locked or changed some of them.
    """
    return executor.run(_RANK, name=name, after=after)[0]


def has_ranked(executor: Transaction, name: str) -> None:
    """Note that all messages of a queue have been ranked since it is managed, and none was missed."""
    executor.run(_HAS_RANKED, name=name)


_SET_RANK = Statement(f"""
WITH j AS (UPDATE {{jobs}} SET priority = %(priority)s::smallint WHERE id = %(id)s RETURNING id, priority)
UPDATE {{messages}} m SET rank = CASE WHEN m.rank IS NOT NULL OR EXISTS ({MANAGED}) THEN j.priority END,
  pool_rank = CASE WHEN m.pool IS NOT NULL THEN j.priority END,
  published_at = CASE WHEN EXISTS ({MANAGED}) OR {LATER} THEN m.published_at END,
  next_check_at = CASE WHEN EXISTS ({MANAGED}) OR {LATER} THEN m.next_check_at ELSE now() END
FROM j WHERE m.job_id = j.id AND m.locked_by IS NULL""")


def set_priority(executor: Transaction, job_id: int, priority: int) -> None:
    """Change the priority of a locked job. Its message in an unmanaged queue is published again with it."""
    executor.run(_SET_RANK, id=job_id, priority=priority)


_COUNTS = Statement(f"""
SELECT count(*) FILTER (WHERE m.locked_by IS NULL AND {DUE}) AS waiting,
  count(*) FILTER (WHERE m.locked_by IS NOT NULL AND w.dead_at IS NULL) AS running,
  count(*) FILTER (WHERE m.locked_by IS NULL AND m.due_at > now() AND {OWED}) AS scheduled,
  count(*) FILTER (WHERE m.locked_by IS NULL AND NOT {OWED}) AS blocked,
  count(*) FILTER (WHERE m.locked_by IS NOT NULL AND (w.id IS NULL OR w.dead_at IS NOT NULL)) AS lost,
  (SELECT count(DISTINCT t.job_id) FROM {{timers}} t JOIN {{jobs}} j ON j.id = t.job_id
   WHERE j.queue = %(name)s AND {IS_TIMER} AND NOT EXISTS (SELECT FROM {{messages}} o WHERE o.job_id = j.id)) AS timers
FROM {{messages}} m LEFT JOIN {{workers}} w ON w.id = m.locked_by WHERE m.queue = %(name)s AND m.doom IS NULL""")


def counts(executor: Reader, name: str) -> Any:
    """Count the messages of a queue by the reason for their wait, and the jobs that wait only for a timer (`timers`).

    `blocked`: parked, because no worker of the queue knows the task, or without a slot of its capacity pool. `lost`:
    held by a worker that was declared dead. Reads the whole queue.
    """
    return executor.run(_COUNTS, name=name)[0]


_PEEK = Statement(f"""
SELECT m.job_id FROM {{messages}} m
WHERE m.queue = %(name)s AND m.job_id IS NOT NULL AND m.locked_by IS NULL AND {DUE}
ORDER BY coalesce(m.rank, (SELECT j.priority FROM {{jobs}} j WHERE j.id = m.job_id), 0::smallint) DESC, m.due_at,
  m.job_id LIMIT %(limit)s""")
_PEEK_RANKED = Statement(f"""
SELECT m.job_id FROM {{messages}} m
WHERE m.queue = %(name)s AND m.rank IS NOT NULL AND m.locked_by IS NULL AND {DUE}
ORDER BY m.rank DESC, m.due_at, m.job_id LIMIT %(limit)s""")


def peek(executor: Reader, name: str, *, limit: int, has_ranks: bool) -> list[int]:
    """Read the jobs that are owed a run, best first; if not all messages have ranks, it reads all that wait."""
    found: Sequence[Any] = executor.run(_PEEK_RANKED if has_ranks else _PEEK, name=name, limit=limit)
    return [row.job_id for row in found]


_FORGET_KEYS = Statement("""
DELETE FROM {limit_keys} WHERE served_at < now() - interval '1 day'""")


def forget_keys(connections: Autocommit) -> None:
    """Forget keys that were not served for a day: like new keys, they then come first."""
    connections.run(_FORGET_KEYS)


RATE_IS_OPEN = "(q.rate_opens_at <= now()) IS NOT FALSE"


_LIMITS = "q.name, q.run_limit IS NOT NULL AS has_limit, q.key_limit IS NOT NULL AS has_keys"
_LOCK_FOR_RUN = Statement(f"SELECT {_LIMITS} FROM {{queues}} q WHERE q.name = %(queue)s FOR NO KEY UPDATE")
_LOCK_FOR_TASK = Statement(f"""
SELECT {_LIMITS} FROM {{queues}} q WHERE q.name = (
  SELECT m.queue FROM {{messages}} m WHERE m.task_id = %(task_id)s AND m.generation = %(generation)s)
FOR NO KEY UPDATE""")
_QUEUE_OF_JOB = Statement("SELECT m.queue FROM {messages} m WHERE m.job_id = %(id)s")


def lock_for_run(executor: Transaction, queue: str) -> Any | None:
    """Lock a managed queue: (name, has_limit, has_keys); None if nobody manages it."""
    return first(executor.run(_LOCK_FOR_RUN, queue=queue))


def lock_for_task(executor: Transaction, key: Key) -> Any | None:
    """Lock the queue of a durable task's message in the same way."""
    return first(executor.run(_LOCK_FOR_TASK, task_id=key[0], generation=key[1]))


def queue_of(executor: Reader, job_id: int) -> str | None:
    """Read in which queue a job's message is; None if it has none."""
    return first_value(executor.run(_QUEUE_OF_JOB, id=job_id), str)


_IS_MANAGED = Statement("SELECT EXISTS (SELECT FROM {queues} q WHERE q.name = %(queue)s) AS found")


def is_managed(executor: Reader, queue: str) -> bool:
    """Tell whether a queue is managed."""
    return bool(executor.run(_IS_MANAGED, queue=queue)[0].found)


AT_GATE = f"m.gate = {Gate.QUEUE}"


MOST_LET_IN = 500
"""Messages of one queue that are let in together where nothing limits them."""

_FREE_PLACES = Statement(f"""
SELECT q.name, q.key_limit IS NOT NULL AS by_keys, least({MOST_LET_IN},
    CASE WHEN q.run_limit IS NOT NULL THEN q.run_limit - (
      SELECT count(*) FROM {{messages}} m WHERE m.queue || '' = q.name AND m.locked_by IS NOT NULL) END,
    CASE WHEN q.rate_interval_s IS NOT NULL AND q.rate_opens_at IS NOT NULL THEN 1 + floor(least(
      extract(epoch FROM now() - q.rate_opens_at)::double precision / q.rate_interval_s,
      (q.rate_burst - 1)::double precision))::int END)::int AS number
FROM {{queues}} q
WHERE q.paused_at IS NULL AND {RATE_IS_OPEN} AND EXISTS (
  SELECT FROM {{messages}} m WHERE m.queue = q.name AND {AT_GATE})
  AND (%(queue)s::text IS NULL OR q.name = %(queue)s)
ORDER BY q.name""")


def free_places(executor: Reader, queue: str | None = None) -> dict[str, Any]:
    """Read how many messages may be let in, `number` and `by_keys` for each queue with an open gate that keeps some."""
    return {row.name: row for row in executor.run(_FREE_PLACES, queue=queue) if row.number > 0}
