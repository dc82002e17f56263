"""What waits, and why.

How many messages each queue has, by the reason for their wait: counted, or estimated for long queues. And why jobs do
not run: the conditions of the gate (`outbox/arming.py`), read for some jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..model.status import Gate
from . import estimates
from .asks import IS_TIMER
from .outbox.arming import DUE, OPENS_AT, OWED
from .outbox.checks import QUEUES
from .statement import Reader, Statement

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
FROM (SELECT *, locked_by IS NULL AS waits FROM {{messages}} {estimates.SAMPLE}) m
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
    share = estimates.share(executor, "messages")
    if share.is_all:
        return executor.run(_OF_A_SHARE, percent=100.0, horizon_s=horizon_s)
    counted = executor.run(_OF_EACH_QUEUE, horizon_s=horizon_s)
    running = {row.queue: row.running for row in executor.run(_RUNNING)}
    sample = {row.queue: row._asdict() for row in executor.run(_OF_A_SHARE, percent=share.percent, horizon_s=horizon_s)}
    return [
        row if row.messages < COUNTED else _estimated(row, sample.get(row.queue, {}), running.get(row.queue, 0), share)
        for row in counted
    ]


def _estimated(counted: Any, sample: Mapping[str, Any], running: int, share: estimates.Share) -> Any:
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
