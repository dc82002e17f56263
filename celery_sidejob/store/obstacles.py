"""Why the next run of a job does not begin now: the conditions of the gate (`outbox/arming.py`), read for a person."""

from __future__ import annotations

from .outbox.arming import OPENS_AT
from .parked import NEVER
from .statement import Reader, Statement, first

_OBSTACLES = Statement(f"""
SELECT CASE
  WHEN j.unit_no IS NOT NULL THEN NULL
  WHEN m.job_id IS NULL THEN CASE WHEN EXISTS (SELECT FROM {{timers}} t WHERE t.job_id = j.id) THEN 'timer' END
  WHEN m.due_at = {NEVER} THEN 'no worker'
  WHEN {OPENS_AT} > now() THEN 'rate'
  WHEN m.due_at > now() THEN 'retry'
  WHEN NOT EXISTS (
    SELECT FROM {{served}} s JOIN {{workers}} w ON w.id = s.worker_id
    WHERE w.dead_at IS NULL AND m.queue = ANY(s.queues) AND j.task = ANY(s.tasks)) THEN 'no worker' END AS obstacle
FROM {{jobs}} j LEFT JOIN {{messages}} m ON m.job_id = j.id WHERE j.id = %(id)s::bigint""")


def obstacles(executor: Reader, job_id: int) -> list[str] | None:
    """Return what the job's next run waits for, nothing if it may begin or none is asked for; None without the job."""
    found = first(executor.run(_OBSTACLES, id=job_id))
    if found is None:
        return None
    return [] if found.obstacle is None else [found.obstacle]
