"""Why jobs do not run: the conditions of the gate (`outbox/arming.py`), read for some jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .asks import IS_TIMER
from .outbox.arming import NEVER, OPENS_AT
from .statement import Reader, Statement

_CONDITIONS = Statement(f"""
SELECT j.id, j.task, m.queue, m.due_at <= now() AS is_due,
  m.due_at = {NEVER} AS is_parked,
  m.due_at > now() AND {OPENS_AT} > now() AS waits_for_rate,
  m.due_at > now() AND m.due_at < {NEVER} AND (m.due_at > {OPENS_AT}) IS NOT FALSE AS waits_for_retry,
  m.job_id IS NULL AND j.unit_no IS NULL
    AND EXISTS (SELECT FROM {{timers}} t WHERE t.job_id = j.id AND t.due_at > now() AND {IS_TIMER}) AS waits_for_timer,
  j.status = 'suspended' AND EXISTS (SELECT FROM {{port_waiters}} w WHERE w.job_id = j.id AND w.run_no = j.run_no)
    AND j.unit_no IS NULL AS waits_for_room
FROM {{jobs}} j LEFT JOIN {{messages}} m ON m.job_id = j.id AND m.locked_by IS NULL
WHERE j.id = ANY(%(job_ids)s::bigint[])""")


def conditions(executor: Reader, job_ids: Iterable[int]) -> Sequence[Any]:
    """Read what the next run of each job waits for; a job that is gone is missing.

    Returns (id, task, queue, is_due, is_parked, waits_for_rate, waits_for_retry, waits_for_timer, waits_for_room).
    They are None where no run is owed, or one is in progress; only the last two are then true or false.
    """
    return executor.run(_CONDITIONS, job_ids=list(job_ids))
