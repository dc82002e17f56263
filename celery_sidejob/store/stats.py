"""The numbers that a monitor reads every few seconds. Their cost does not grow with finished or waiting work.

A few rows are counted. Very many would take too long to count while a person waits: they are estimated from a sample of
the table's pages, and marked as an estimate. A small table is read as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..model.status import UNFINISHED
from .outbox.publishing import QUEUES
from .statement import Reader, Statement

EXACT_PAGES = 1000
"""The most pages (of 8 kB) of a table that is read as a whole."""
SAMPLED_PAGES = 600
"""How many pages of a larger table are read to find out how its rows differ."""
COUNTING_PAGES = 300
"""How many pages of a larger table are read to find out only how many rows it has."""
JOINED_PAGES = 50
"""How many pages of a table are read if the job of each row is read as well."""
COUNTED = 10_000
"""The most rows that are counted one by one, if an index has just these rows."""
DIGITS = 3
SAMPLE = "TABLESAMPLE SYSTEM (%(percent)s) REPEATABLE (1)"
"""The same pages each time: a difference between two estimates is a real change, and the pages are in memory by then.
"""

_PAGES = {
    table: Statement(f"SELECT pg_relation_size('{{{table}}}'::regclass) / 8192 AS pages")
    for table in ("messages", "jobs", "timers", "askings", "dead")
}


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a table that is read."""

    percent: float

    @property
    def is_all(self) -> bool:
        """Whether counts are exact."""
        return self.percent >= 100

    def whole(self, count: int) -> int:
        """Return the rows of the whole table for this many rows in the share, rounded to the digits that are known."""
        number = count * 100 / self.percent
        return int(number) if self.is_all else int(float(f"{number:.{DIGITS}g}"))


@dataclass(frozen=True, slots=True)
class Count:
    """A number of rows."""

    number: int
    is_estimated: bool = False


def share(executor: Reader, table: str, *, exact: int | None = None, sampled: int | None = None) -> Share:
    """Return the share of a table to read: all of it up to `exact` pages, otherwise `sampled` pages."""
    pages = executor.run(_PAGES[table])[0].pages
    if pages <= (EXACT_PAGES if exact is None else exact):
        return Share(100.0)
    return Share(min(100.0, max(1e-4, 100.0 * (SAMPLED_PAGES if sampled is None else sampled) / pages)))


def share_joined(executor: Reader, table: str) -> Share:
    """Return the share of a table to read if the job of each row is read as well."""
    return share(executor, table, exact=JOINED_PAGES, sampled=JOINED_PAGES)


def count(executor: Reader, few: Statement, many: Statement, table: str) -> Count:
    """Count rows with `few`, which finds at most `COUNTED`; if it finds that many, estimate them with `many`."""
    found = executor.run(few)[0].rows
    if found < COUNTED:
        return Count(found)
    looked_at = share(executor, table, sampled=COUNTING_PAGES)
    sampled = executor.run(many, percent=looked_at.percent)[0].rows
    return Count(max(found, looked_at.whole(sampled)), not looked_at.is_all)


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
    looked_at = share(executor, "jobs")
    rows = executor.run(_UNFINISHED_SAMPLE, percent=looked_at.percent)
    return {row.status: looked_at.whole(row.jobs) for row in rows}, not looked_at.is_all


_TIMERS = Statement(f"SELECT count(*) AS rows FROM (SELECT FROM {{timers}} ORDER BY due_at LIMIT {COUNTED}) t")
_TIMERS_SAMPLE = Statement(f"SELECT count(*) AS rows FROM {{timers}} {SAMPLE}")
_FIRST_TIMER = Statement("""
SELECT extract(epoch FROM now() - min(due_at))::double precision AS oldest_due_s FROM {timers}""")


def timers(executor: Reader) -> tuple[Count, float | None]:
    """Count timers, and tell how long ago the first was due; negative if it is due in the future."""
    found = count(executor, _TIMERS, _TIMERS_SAMPLE, "timers")
    return found, executor.run(_FIRST_TIMER)[0].oldest_due_s


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
    found = count(executor, _RESULTS, _RESULTS_SAMPLE, "askings")
    first = executor.run(_FIRST_RESULT) if found.number else ()
    return found, first[0].oldest_s if first else None


_DEAD = Statement(f"SELECT count(*) AS rows FROM (SELECT FROM {{dead}} ORDER BY id LIMIT {COUNTED}) d")
_DEAD_SAMPLE = Statement(f"SELECT count(*) AS rows FROM {{dead}} {SAMPLE}")
_DEAD_JOBS = Statement(f"""
SELECT count(*) AS rows FROM (SELECT FROM {{dead}} WHERE job_id > 0 ORDER BY job_id LIMIT {COUNTED}) d""")
_DEAD_JOBS_SAMPLE = Statement(f"""
SELECT count(*) AS rows FROM {{dead}} {SAMPLE} WHERE job_id IS NOT NULL""")


def dead_entries(executor: Reader) -> tuple[Count, Count]:
    """Count the entries of the dead set, and the jobs among them."""
    return (
        count(executor, _DEAD, _DEAD_SAMPLE, "dead"),
        count(executor, _DEAD_JOBS, _DEAD_JOBS_SAMPLE, "dead"),
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
        looked_at = share(executor, "jobs")
        suspended = looked_at.whole(executor.run(_SUSPENDED_SAMPLE, percent=looked_at.percent, queue=queue)[0].rows)
    if queue is None:
        return suspended, count(executor, _TIMERS, _TIMERS_SAMPLE, "timers").number
    looked_at = share_joined(executor, "timers")
    return suspended, looked_at.whole(executor.run(_TIMERS_OF_QUEUE, percent=looked_at.percent, queue=queue)[0].rows)
