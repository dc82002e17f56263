"""Why jobs do not run: the conditions of the gate (`outbox/arming.py`), read for some jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .asks import IS_TIMER
from .outbox.arming import AT_GATE, IN_POOL, NEVER, OPENS_AT, WITHOUT_SLOT
from .statement import Reader, Statement

_DELAYED = f"""({IN_POOL} AND m.due_at > now() + {WITHOUT_SLOT} OR m.due_at > now() AND m.due_at < {AT_GATE}
    AND (m.due_at > {OPENS_AT}) IS NOT FALSE)"""
"""Whether a message waits for its own time, as SQL: the backoff of a retry, or the delay of a stage (`then`)."""

_CONDITIONS = Statement(f"""
SELECT j.id, j.task, m.queue, m.due_at <= now() AS is_due,
  m.due_at = {NEVER} AS is_parked,
  m.due_at <= now() AND q.paused_at IS NOT NULL AS waits_for_pause,
  m.due_at <= now() AND ((SELECT count(*) FROM {{messages}} h
      WHERE h.queue || '' = m.queue AND h.locked_by IS NOT NULL) >= q.run_limit
    OR m.limit_key IS NOT NULL AND (SELECT count(*) FROM {{messages}} h
      WHERE h.queue || '' = m.queue AND h.locked_by IS NOT NULL AND h.limit_key = m.limit_key) >= q.key_limit
    ) AS waits_for_limit,
  m.due_at > now() AND {OPENS_AT} > now() OR m.due_at <= now() AND q.rate_opens_at > now() AS waits_for_rate,
  {IN_POOL} AND m.due_at <= now() + {WITHOUT_SLOT} AS waits_for_pool,
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
    """Read what the next run of each job waits for; a job that is gone is missing.

    Returns (id, task, queue, is_due, is_parked, waits_for_pause, waits_for_limit, waits_for_rate, waits_for_pool,
    waits_for_retry, waits_for_timer, waits_for_room, waits_for_jobs).
    They are None where no run is owed, or one is in progress; only the last three are then true or false.
    """
    return executor.run(_CONDITIONS, job_ids=list(job_ids))
