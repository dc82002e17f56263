"""Lists and counts of jobs, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .jobs import HANDLE
from .statement import Reader, Statement

SMALL = 10_000
"""Up to this many children of a job, or timers, count as few."""
FEW = 1000
"""Up to this many jobs that are old enough count as few: they are counted for each page of them."""

_OTHERS = """
  AND (%(task)s::text IS NULL OR j.task = %(task)s) AND (%(queue)s::text IS NULL OR j.queue = %(queue)s)
  AND (%(created_by)s::text IS NULL OR j.created_by = %(created_by)s)
  AND (%(schedule)s::text IS NULL OR j.schedule = %(schedule)s)
  AND (%(parent_id)s::bigint IS NULL OR j.parent_id = %(parent_id)s)
  AND (%(older_s)s::double precision IS NULL OR j.created_at < now() - make_interval(secs => %(older_s)s))"""
_TAGGED = """
  AND (%(tag)s::text IS NULL
    OR (SELECT g.job_id FROM {tags} g WHERE g.tag = %(tag)s AND g.job_id = j.id LIMIT 1) IS NOT NULL)"""
_STATUSES = "(%(statuses)s::text[] IS NULL OR j.status = ANY(%(statuses)s::text[]))"

# Postgres expects hardly any job to match, and would start parallel workers to read all: that takes longer than a page.
# A condition that only the leader may look at prevents them.
_LIST = Statement(f"""
SELECT {HANDLE} FROM {{jobs}} j WHERE j.id > %(after)s AND {_STATUSES}{_OTHERS} AND pg_backend_pid() IS NOT NULL
ORDER BY j.id LIMIT %(limit)s""")


def _among(ids: str) -> Statement:
    """Find jobs among some ids, which are few."""
    return Statement(f"""
WITH few AS MATERIALIZED ({ids})
SELECT {HANDLE} FROM (SELECT DISTINCT job_id FROM few WHERE job_id > %(after)s ORDER BY job_id) f CROSS JOIN LATERAL (
  SELECT * FROM {{jobs}} x WHERE x.id = f.job_id OFFSET 0) j
WHERE {_STATUSES}{_OTHERS}{_TAGGED} ORDER BY f.job_id LIMIT %(limit)s""")


def _along(*orders: str) -> Statement:
    """Find jobs by walking along ids in their order, until there are enough: each is read by an index."""
    ids = "\n    UNION ALL ".join(
        f"SELECT job_id FROM ({order} ORDER BY job_id) o{n}" for n, order in enumerate(orders)
    )
    return Statement(f"""
SELECT {HANDLE} FROM (
  SELECT DISTINCT job_id FROM ({ids}) c ORDER BY job_id) c CROSS JOIN LATERAL (
  SELECT * FROM {{jobs}} x WHERE x.id = c.job_id OFFSET 0) j
WHERE {_STATUSES}{_OTHERS} ORDER BY c.job_id LIMIT %(limit)s""")


_LIST_RUNNING = _among("SELECT job_id FROM {messages} WHERE locked_by IS NOT NULL AND job_id IS NOT NULL")
_LIST_OF_KEY = _among("SELECT job_id FROM {askings} WHERE unique_key = %(unique)s::text AND closed_at IS NULL")
_LIST_OF_PARENT = _among("SELECT id AS job_id FROM {jobs} WHERE parent_id = %(parent_id)s")
_OLD = """
  SELECT id AS job_id FROM {jobs} WHERE created_at < now() - make_interval(secs => %(older_s)s) ORDER BY created_at
  LIMIT """
_LIST_OLD = _among(f"{_OLD}{FEW}")
_LIST_QUEUED = Statement(f"""
SELECT {HANDLE} FROM {{jobs}} j
WHERE j.id > %(after)s AND j.id IN (
    SELECT m.job_id FROM {{messages}} m WHERE m.queue = %(queue)s UNION SELECT t.job_id FROM {{timers}} t)
  AND {_STATUSES}{_OTHERS} ORDER BY j.id LIMIT %(limit)s""")
_LIST_QUEUED_ALONG = _along(
    "SELECT job_id FROM {messages} WHERE queue = %(queue)s AND job_id > %(after)s",
    "SELECT job_id FROM {timers} WHERE job_id > %(after)s",
)
_LIST_FAILED = _along("SELECT job_id FROM {dead} WHERE job_id > %(after)s")
_LIST_TAGGED = _along("SELECT job_id FROM {tags} WHERE tag = %(tag)s::text AND job_id > %(after)s")
_IS_LARGE_FAMILY = Statement(f"""
SELECT count(*) > {SMALL} AS large FROM (
  SELECT FROM {{jobs}} WHERE parent_id = %(parent_id)s ORDER BY parent_id, name LIMIT {SMALL} + 1) few""")
_ARE_MANY_OLD = Statement(f"SELECT count(*) > {FEW} AS many FROM ({_OLD}{FEW} + 1) few")
_ARE_MANY_TIMERS = Statement(f"""
SELECT count(*) > {SMALL} AS many FROM (SELECT FROM {{timers}} ORDER BY due_at LIMIT {SMALL} + 1) few""")


def page(
    executor: Reader, *, statuses: list[str] | None, task: str | None, queue: str | None, created_by: str | None,
    parent_id: int | None, unique: str | None, after: int, limit: int, tag: str | None = None,
    older_s: float | None = None, schedule: str | None = None,
) -> Sequence[Any]:  # fmt: skip
    """Read the next `limit` jobs that match, by id.

    Running jobs, the children of one job, the open job of a unique key and up to `FEW` jobs that are old enough are
    found by an index. For failed jobs and the queued jobs of one queue, the query walks along their entries; for others
    along all jobs, until enough match. If there are very many timers, it reads all of them and the whole queue.
    """
    how = _LIST
    wanted = set(statuses or ())
    if unique is not None:
        how = _LIST_OF_KEY
    elif tag is not None and wanted != {"running"}:
        how = _LIST_TAGGED
    elif parent_id is not None and tag is None and not executor.run(_IS_LARGE_FAMILY, parent_id=parent_id)[0].large:
        how = _LIST_OF_PARENT
    elif wanted == {"running"}:
        how = _LIST_RUNNING
    elif wanted == {"queued"} and queue is not None:
        how = _LIST_QUEUED if executor.run(_ARE_MANY_TIMERS)[0].many else _LIST_QUEUED_ALONG
    elif wanted == {"failed"}:
        how = _LIST_FAILED
    elif older_s is not None and not executor.run(_ARE_MANY_OLD, older_s=older_s)[0].many:
        how = _LIST_OLD
    return executor.run(
        how, statuses=statuses, task=task, queue=queue, created_by=created_by, parent_id=parent_id,
        unique=unique, tag=tag, older_s=older_s, schedule=schedule, after=after, limit=limit,
    )  # fmt: skip


_COUNT = {
    column: Statement(f"SELECT j.{column} AS key, count(*) AS jobs FROM {{jobs}} j GROUP BY 1 ORDER BY 1")
    for column in ("status", "task", "queue", "created_by")
}


def count(executor: Reader, by: str) -> dict[str, int]:
    """Count jobs by one of their columns; reads the whole table."""
    return {row.key: row.jobs for row in executor.run(_COUNT[by])}


COUNTED_BY = tuple(_COUNT)


_KNOWS_QUEUE = Statement("""
SELECT EXISTS (SELECT FROM {messages} WHERE queue = %(queue)s)
  OR EXISTS (SELECT FROM {registry} WHERE queue = %(queue)s)
  OR EXISTS (SELECT FROM {dead} WHERE queue = %(queue)s) OR EXISTS (SELECT FROM {jobs} WHERE queue = %(queue)s)
  AS found""")


def knows_queue(executor: Reader, queue: str) -> bool:
    """Tell whether any row of the store belongs to this queue; reads all jobs if none does."""
    return bool(executor.run(_KNOWS_QUEUE, queue=queue)[0].found)
