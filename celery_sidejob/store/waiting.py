"""Why jobs do not run: the conditions of the gate (`outbox/arming.py`), read for some jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..model.gate import Gate
from .asks import IS_TIMER
from .outbox.arming import DUE, OPENS_AT, OWED
from .statement import Reader, Statement

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
  j.blocked IS TRUE AND j.unit_no IS NULL AND j.status = 'queued' AS waits_for_jobs
FROM {{jobs}} j LEFT JOIN {{messages}} m ON m.job_id = j.id AND m.locked_by IS NULL
  LEFT JOIN {{queues}} q ON q.name = m.queue
WHERE j.id = ANY(%(job_ids)s::bigint[])""")


def conditions(executor: Reader, job_ids: Iterable[int]) -> Sequence[Any]:
    """Read why the next run of each job waits; a job that is gone is missing.

    Returns (id, task, queue, is_due, is_parked, waits_for_pause, waits_for_limit, waits_for_rate, waits_for_pool,
    waits_for_retry, waits_for_timer, waits_for_room, waits_for_jobs).
    If no run is owed, or a run is in progress, they are None, except the last three.
    """
    return executor.run(_CONDITIONS, job_ids=list(job_ids))
