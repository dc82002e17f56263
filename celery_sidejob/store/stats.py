"""The numbers that a monitor reads every few seconds. Their cost does not grow with finished or waiting work.

A few rows are counted; very many are estimated from a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..model.status import UNFINISHED
from . import estimates
from .estimates import COUNTED, SAMPLE, Count
from .outbox.checks import QUEUES
from .statement import Reader, Statement

GROUPED = 10_000
"""The most entries of the dead set, the newest, that are counted by group."""
STATUSES = f"({', '.join(f'{str(status)!r}' for status in UNFINISHED)})"

_ASKED = Statement(f"""
SELECT (SELECT count(*) FROM (SELECT FROM {{askings}} WHERE closed_at IS NULL ORDER BY job_id LIMIT {COUNTED}) a)
  + (SELECT count(*) FROM (SELECT FROM {{messages}} WHERE job_id > 0 ORDER BY job_id LIMIT {COUNTED}) m) AS rows""")
_UNFINISHED = Statement(f"""
SELECT j.status, count(*) AS jobs FROM (
  SELECT job_id FROM {{askings}} WHERE closed_at IS NULL
  UNION SELECT job_id FROM {{messages}} WHERE job_id IS NOT NULL) u
CROSS JOIN LATERAL (SELECT x.status FROM {{jobs}} x WHERE x.id = u.job_id OFFSET 0) j
WHERE j.status IN {STATUSES} GROUP BY j.status""")
_UNFINISHED_SAMPLE = Statement(f"""
SELECT j.status, count(*) AS jobs FROM {{jobs}} j {SAMPLE}
WHERE j.status IN {STATUSES} GROUP BY j.status""")


def unfinished(executor: Reader) -> tuple[dict[str, int], bool]:
    """Count the jobs with work pending, by status; estimate them if there are very many, and tell whether it is so.

    Finished jobs are not read, except those in the pages of the sample.
    """
    if executor.run(_ASKED)[0].rows < COUNTED:
        return {row.status: row.jobs for row in executor.run(_UNFINISHED)}, False
    share = estimates.share(executor, "jobs")
    rows = executor.run(_UNFINISHED_SAMPLE, percent=share.percent)
    return {row.status: share.whole(row.jobs) for row in rows}, not share.is_all


_TIMERS = Statement(f"SELECT count(*) AS rows FROM (SELECT FROM {{timers}} ORDER BY due_at LIMIT {COUNTED}) t")
_TIMERS_SAMPLE = Statement(f"SELECT count(*) AS rows FROM {{timers}} {SAMPLE}")
_FIRST_TIMER = Statement("""
SELECT extract(epoch FROM now() - min(due_at))::double precision AS oldest_due_s FROM {timers}""")


def timers(executor: Reader) -> tuple[Count, float | None]:
    """Count timers, and tell how long ago the first was due; negative if it is due in the future."""
    count = estimates.count(executor, _TIMERS, _TIMERS_SAMPLE, "timers")
    return count, executor.run(_FIRST_TIMER)[0].oldest_due_s


_UNSENT = "closed_at IS NOT NULL AND stored_at IS NULL"
_RESULTS = Statement(f"""
SELECT count(*) AS rows FROM (SELECT FROM {{askings}} WHERE {_UNSENT} ORDER BY closed_at LIMIT {COUNTED}) a""")
_RESULTS_SAMPLE = Statement(f"""
SELECT count(*) AS rows FROM {{askings}} {SAMPLE} WHERE {_UNSENT}""")
_FIRST_RESULT = Statement(f"""
SELECT extract(epoch FROM now() - closed_at)::double precision AS oldest_s FROM {{askings}}
WHERE {_UNSENT} ORDER BY closed_at LIMIT 1""")


def results(executor: Reader) -> tuple[Count, float | None]:
    """Count results that the backend does not have yet, and tell how long the oldest has waited."""
    count = estimates.count(executor, _RESULTS, _RESULTS_SAMPLE, "askings")
    first = executor.run(_FIRST_RESULT) if count.number else ()
    return count, first[0].oldest_s if first else None


_DEAD = Statement(f"SELECT count(*) AS rows FROM (SELECT FROM {{dead}} ORDER BY id LIMIT {COUNTED}) d")
_DEAD_SAMPLE = Statement(f"SELECT count(*) AS rows FROM {{dead}} {SAMPLE}")
_DEAD_JOBS = Statement(f"""
SELECT count(*) AS rows FROM (SELECT FROM {{dead}} WHERE job_id > 0 ORDER BY job_id LIMIT {COUNTED}) d""")
_DEAD_JOBS_SAMPLE = Statement(f"""
SELECT count(*) AS rows FROM {{dead}} {SAMPLE} WHERE job_id IS NOT NULL""")


def dead_entries(executor: Reader) -> tuple[Count, Count]:
    """Count the entries of the dead set, and the jobs among them."""
    return (
        estimates.count(executor, _DEAD, _DEAD_SAMPLE, "dead"),
        estimates.count(executor, _DEAD_JOBS, _DEAD_JOBS_SAMPLE, "dead"),
    )


_SWEEP = Statement(f"""{QUEUES},
late AS (
  SELECT min(x.next_check_at) AS at FROM q CROSS JOIN LATERAL (
    SELECT m.next_check_at FROM {{messages}} m
    WHERE m.queue = q.queue AND m.locked_by IS NULL AND m.next_check_at < 'infinity'
    ORDER BY m.next_check_at LIMIT 1) x
  WHERE q.queue IS NOT NULL)
SELECT extract(epoch FROM now() - least((SELECT at FROM late), (SELECT min(due_at) FROM {{timers}})))::double precision
    AS lag_s,
  extract(epoch FROM now() - (SELECT min(due_at) FROM {{timers}}))::double precision AS timers_lag_s,
  extract(epoch FROM now() - l.expires_at)::double precision AS expired_s, l.holder, w.ident
FROM {{leases}} l LEFT JOIN {{workers}} w ON w.id = l.holder AND w.dead_at IS NULL WHERE l.name = 'sweeper'""")


def sweep(executor: Reader) -> Any:
    """Tell how long the oldest work for a sweeper has been due, which worker sweeps, and since when."""
    return executor.run(_SWEEP)[0]


_DEAD_GROUPS = Statement("""
SELECT d.task, d.failure_group AS "group", d.reason, count(*) AS entries FROM (
  SELECT task, failure_group, reason FROM {dead} ORDER BY id DESC LIMIT %(limit)s) d
GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3""")


def dead_groups(executor: Reader) -> Sequence[Any]:
    """Count the newest `GROUPED` entries of the dead set by task, failure group and reason."""
    return executor.run(_DEAD_GROUPS, limit=GROUPED)


def _dead_of(which: str) -> Statement:
    return Statement(f"""
SELECT d.queue, d.task, count(*) AS entries FROM (
  SELECT queue, task FROM {{dead}} {which} ORDER BY id DESC LIMIT %(limit)s) d
WHERE %(queue)s::text IS NULL OR d.queue = %(queue)s
GROUP BY 1, 2""")


_DEAD_OF_ALL = _dead_of("")
_DEAD_OF_TASK = _dead_of("WHERE task = %(task)s")


def dead_of(executor: Reader, *, queue: str | None, task: str | None) -> dict[tuple[str, str], int]:
    """Count the newest `GROUPED` entries of the dead set, or of a task, in all queues or one: {(queue, task): n}."""
    if task is None:
        found = executor.run(_DEAD_OF_ALL, queue=queue, limit=GROUPED)
    else:
        found = executor.run(_DEAD_OF_TASK, queue=queue, task=task, limit=GROUPED)
    return {(row.queue or "", row.task or ""): row.entries for row in found}


_SUSPENDED = Statement("""
SELECT count(*) AS rows FROM {askings} a JOIN {jobs} j ON j.id = a.job_id
WHERE a.closed_at IS NULL AND j.status = 'suspended' AND (%(queue)s::text IS NULL OR j.queue = %(queue)s)""")
_SUSPENDED_SAMPLE = Statement(f"""
SELECT count(*) AS rows FROM {{jobs}} j {SAMPLE}
WHERE j.status = 'suspended' AND (%(queue)s::text IS NULL OR j.queue = %(queue)s)""")
_TIMERS_OF_QUEUE = Statement(f"""
SELECT count(*) AS rows FROM {{timers}} t {SAMPLE} CROSS JOIN LATERAL (
  SELECT FROM {{jobs}} j WHERE j.id = t.job_id AND j.queue = %(queue)s OFFSET 0) j""")


def resting(executor: Reader, queue: str | None) -> tuple[int, int]:
    """Count unfinished work that waits for no worker, in one queue or in all: (suspended jobs, timers).

    Large numbers are estimated, as in `unfinished` and `timers`.
    """
    if executor.run(_ASKED)[0].rows < COUNTED:
        suspended: int = executor.run(_SUSPENDED, queue=queue)[0].rows
    else:
        jobs = estimates.share(executor, "jobs")
        suspended = jobs.whole(executor.run(_SUSPENDED_SAMPLE, percent=jobs.percent, queue=queue)[0].rows)
    if queue is None:
        return suspended, estimates.count(executor, _TIMERS, _TIMERS_SAMPLE, "timers").number
    share = estimates.share_joined(executor, "timers")
    return suspended, share.whole(executor.run(_TIMERS_OF_QUEUE, percent=share.percent, queue=queue)[0].rows)
