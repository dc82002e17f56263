"""Why the next run of a job does not begin now: the conditions of the gate (`outbox/arming.py`), read for a person."""

from __future__ import annotations

from .outbox.arming import OPENS_AT
from .parked import NEVER
from .statement import Reader, Statement, first

_OBSTACLES = Statement(f"""
SELECT array_remove(CASE
  WHEN j.unit_no IS NOT NULL THEN NULL
  WHEN m.job_id IS NULL
    THEN ARRAY[CASE WHEN EXISTS (SELECT FROM {{timers}} t WHERE t.job_id = j.id) THEN 'timer'::text END]
  WHEN m.due_at = {NEVER} THEN ARRAY['no worker'::text]
  WHEN m.due_at > now() THEN ARRAY[
    CASE WHEN m.due_at > greatest(now(), {OPENS_AT}) THEN 'retry'::text END,
    CASE WHEN {OPENS_AT} > now() THEN 'rate'::text END]
  WHEN NOT EXISTS (
    SELECT FROM {{served}} s JOIN {{workers}} w ON w.id = s.worker_id
    WHERE w.dead_at IS NULL AND m.queue = ANY(s.queues) AND j.task = ANY(s.tasks))
    THEN ARRAY['no worker'::text] END, NULL) AS obstacles
FROM {{jobs}} j LEFT JOIN {{messages}} m ON m.job_id = j.id WHERE j.id = %(id)s::bigint""")


def obstacles(executor: Reader, job_id: int) -> list[str] | None:
    """Return what the job's next run waits for, nothing if it may begin or none is asked for; None without the job.

    Both a retry and a rate are named if each of them alone would delay the run.
    """
    found = first(executor.run(_OBSTACLES, id=job_id))
    return None if found is None else found.obstacles or []
