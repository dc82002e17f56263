"""What a monitor asks every few seconds. None of it reads what is finished; the backlog is read as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .messages import QUEUES
from .statement import Executor, Statement

GROUPED = 10_000
"""How many entries of the dead set, from the newest on, are counted by group."""

_UNFINISHED = Statement("""
SELECT j.status, count(*) AS jobs FROM (
  SELECT job_id FROM {askings} WHERE closed_at IS NULL
  UNION SELECT job_id FROM {messages} WHERE job_id IS NOT NULL) u
JOIN {jobs} j ON j.id = u.job_id WHERE j.status IN ('queued', 'running', 'suspended', 'terminating')
GROUP BY j.status""")


def unfinished(executor: Executor) -> dict[str, int]:
    """Count the jobs that something is asked of, by status; finished ones are not looked at."""
    return {row.status: row.jobs for row in executor.run(_UNFINISHED)}


_TIMERS = Statement("""
SELECT count(*) AS waiting, extract(epoch FROM now() - min(due_at))::double precision AS oldest_due_s FROM {timers}""")


def timers(executor: Executor) -> Any:
    """Count timers, and tell how long ago the first was due; less than nothing if that is still to come."""
    return executor.run(_TIMERS)[0]


_RESULTS = Statement("""
SELECT count(*) AS unsent, extract(epoch FROM now() - min(closed_at))::double precision AS oldest_s
FROM {askings} WHERE closed_at IS NOT NULL AND stored_at IS NULL""")


def results(executor: Executor) -> Any:
    """Count results that the backend does not have yet."""
    return executor.run(_RESULTS)[0]


_SWEEP = Statement(
    QUEUES
    + """,
late AS (
  SELECT min(x.look_at) AS at FROM q CROSS JOIN LATERAL (
    SELECT m.look_at FROM {messages} m WHERE m.queue = q.queue AND m.locked_by IS NULL ORDER BY m.look_at LIMIT 1) x
  WHERE q.queue IS NOT NULL)
SELECT extract(epoch FROM now() - least((SELECT at FROM late), (SELECT min(due_at) FROM {timers})))::double precision
    AS lag_s,
  extract(epoch FROM now() - (SELECT min(due_at) FROM {timers}))::double precision AS timers_lag_s,
  extract(epoch FROM now() - l.expires_at)::double precision AS expired_s, l.holder, w.ident
FROM {leases} l LEFT JOIN {workers} w ON w.id = l.holder AND w.dead_at IS NULL WHERE l.name = 'sweeper'"""
)


def sweep(executor: Executor) -> Any:
    """Tell how long the oldest thing that a sweeper should have seen to has been due, and who sweeps since when."""
    return executor.run(_SWEEP)[0]


_DEAD_GROUPS = Statement("""
SELECT d.task, split_part(coalesce(d.error, ''), ':', 1) AS error, count(*) AS entries FROM (
  SELECT task, error FROM {dead} ORDER BY id DESC LIMIT %(limit)s) d
GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2""")


def dead_groups(executor: Executor) -> Sequence[Any]:
    """Count the newest `GROUPED` entries of the dead set by task and kind of error."""
    return executor.run(_DEAD_GROUPS, limit=GROUPED)


_RESTING = Statement("""
SELECT
  (SELECT count(*) FROM {askings} a JOIN {jobs} j ON j.id = a.job_id
   WHERE a.closed_at IS NULL AND j.status = 'suspended' AND (%(queue)s::text IS NULL OR j.queue = %(queue)s))
    AS suspended,
  (SELECT count(*) FROM {timers} t JOIN {jobs} j ON j.id = t.job_id
   WHERE %(queue)s::text IS NULL OR j.queue = %(queue)s) AS timers""")


def resting(executor: Executor, queue: str | None) -> Any:
    """Count what is not finished and waits for nobody's worker: suspended jobs and timers, of one queue or of all."""
    return executor.run(_RESTING, queue=queue)[0]
