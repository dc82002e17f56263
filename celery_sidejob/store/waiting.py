"""Why a job does not run: the conditions of the gate (`outbox/arming.py`), read for one job."""

from __future__ import annotations

from typing import Any

from .asks import IS_TIMER
from .outbox.arming import NEVER, OPENS_AT
from .statement import Reader, Statement, first

_CONDITIONS = Statement(f"""
SELECT j.task, m.queue, m.due_at <= now() AS is_due,
  m.due_at = {NEVER} AS is_parked,
  m.due_at > now() AND {OPENS_AT} > now() AS waits_for_rate,
  m.due_at > now() AND m.due_at < {NEVER} AND (m.due_at > {OPENS_AT}) IS NOT FALSE AS waits_for_retry,
  m.job_id IS NULL AND j.unit_no IS NULL
    AND EXISTS (SELECT FROM {{timers}} t WHERE t.job_id = j.id AND t.due_at > now() AND {IS_TIMER}) AS waits_for_timer,
  j.status = 'suspended' AND EXISTS (SELECT FROM {{port_waiters}} w WHERE w.job_id = j.id AND w.run_no = j.run_no)
    AND j.unit_no IS NULL AS waits_for_room
FROM {{jobs}} j LEFT JOIN {{messages}} m ON m.job_id = j.id AND m.locked_by IS NULL
WHERE j.id = %(job_id)s""")


def conditions(executor: Reader, job_id: int) -> Any | None:
    """Read what a job's next run waits for; None if there is no such job.

    Returns (task, queue, is_due, is_parked, waits_for_rate, waits_for_retry, waits_for_timer, waits_for_room).
    They are None where no run is owed, or one is in progress; only the last two are then true or false.
    """
    return first(executor.run(_CONDITIONS, job_id=job_id))
