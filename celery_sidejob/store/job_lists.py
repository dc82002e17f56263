"""Lists and counts of jobs, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from ..model.checks import MOST
from . import waiting
from .jobs import HANDLE
from .statement import Reader, Statement, first

SMALL = 10_000
"""The most children of a job, or timers, that count as few."""
LOOKED = 10_000
"""How many jobs, or entries of an index, `look` goes through at once."""
FEW = 1000
"""The most jobs old enough, or young enough, that count as few: they are counted again for each page."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The conditions of a list of jobs; None for no condition."""

    statuses: Sequence[str] | None = None
    task: str | None = None
    queue: str | None = None
    created_by: str | None = None
    parent_id: int | None = None
    unique: str | None = None
    tag: str | None = None
    batch_id: int | None = None
    older_s: float | None = None
    since: datetime | None = None
    since_s: float | None = None
    """The age of jobs made `since`, if it is given in seconds."""
    schedule: str | None = None
    text: str | None = None
    """A part of the JSON text of the arguments."""
    after: int = 0
    before: int = MOST

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the statements."""
        return {name: getattr(self, name) for name in self.__slots__}


_SINCE = "coalesce(%(since)s::timestamptz, now() - make_interval(secs => %(since_s)s::double precision))"
"""The time from which on the jobs were made, as SQL; NULL for all."""
_OTHERS = f"""
  AND (%(task)s::text IS NULL OR j.task = %(task)s) AND (%(queue)s::text IS NULL OR j.queue = %(queue)s)
  AND (%(created_by)s::text IS NULL OR j.created_by = %(created_by)s)
  AND (%(schedule)s::text IS NULL OR j.schedule = %(schedule)s)
  AND (%(parent_id)s::bigint IS NULL OR j.parent_id = %(parent_id)s)
  AND (%(older_s)s::double precision IS NULL OR j.created_at < now() - make_interval(secs => %(older_s)s))
  AND (j.created_at >= {_SINCE}) IS NOT FALSE
  AND (%(text)s::text IS NULL OR strpos(concat(j.args, ' ', j.kwargs), %(text)s) > 0)"""
_TAGGED = """
  AND (%(tag)s::text IS NULL
    OR (SELECT g.job_id FROM {tags} g WHERE g.tag = %(tag)s AND g.job_id = j.id LIMIT 1) IS NOT NULL)"""
_OF_BATCH = """
  AND (%(batch_id)s::bigint IS NULL
    OR (SELECT m.job_id FROM {batch_members} m WHERE m.batch_id = %(batch_id)s AND m.job_id = j.id LIMIT 1)
      IS NOT NULL)"""
_STATUSES = "(%(statuses)s::text[] IS NULL OR j.status = ANY(%(statuses)s::text[]))"


def _in_order(text: str) -> Mapping[str, Statement]:
    """Return the statement for the oldest first and for the newest first: `@order` in its text becomes ASC or DESC."""
    return {name: Statement(text.replace("@order", order)) for name, order in (("oldest", "ASC"), ("newest", "DESC"))}


# Postgres expects hardly any job to match, and would start parallel workers to read all: that takes longer than a page.
# A condition that only the leader may evaluate prevents them.
_LIST = _in_order(f"""
SELECT {HANDLE} FROM {{jobs}} j
WHERE j.id > %(after)s AND j.id < %(before)s AND {_STATUSES}{_OTHERS} AND pg_backend_pid() IS NOT NULL
ORDER BY j.id @order LIMIT %(limit)s""")


def _among(ids: str) -> Mapping[str, Statement]:
    """Find jobs among a few ids."""
    return _in_order(f"""
WITH few AS MATERIALIZED ({ids})
SELECT {HANDLE} FROM (
  SELECT DISTINCT job_id FROM few WHERE job_id > %(after)s AND job_id < %(before)s ORDER BY job_id @order) f
  CROSS JOIN LATERAL (SELECT * FROM {{jobs}} x WHERE x.id = f.job_id OFFSET 0) j
WHERE {_STATUSES}{_OTHERS}{_TAGGED}{_OF_BATCH} ORDER BY f.job_id @order LIMIT %(limit)s""")


def _along(*orders: str, also: str = "") -> Mapping[str, Statement]:
    """Find jobs by walking along ids in their order until there are enough; each job is read by an index."""
    ids = "\n    UNION ALL ".join(
        f"SELECT job_id FROM ({order} AND job_id > %(after)s AND job_id < %(before)s ORDER BY job_id @order) o{n}"
        for n, order in enumerate(orders)
    )
    return _in_order(f"""
SELECT {HANDLE} FROM (
  SELECT DISTINCT job_id FROM ({ids}) c ORDER BY job_id @order) c CROSS JOIN LATERAL (
  SELECT * FROM {{jobs}} x WHERE x.id = c.job_id OFFSET 0) j
WHERE {_STATUSES}{_OTHERS}{also} ORDER BY c.job_id @order LIMIT %(limit)s""")


_LIST_RUNNING = _among("SELECT job_id FROM {messages} WHERE locked_by IS NOT NULL AND job_id IS NOT NULL")
_LIST_OF_KEY = _among("SELECT job_id FROM {askings} WHERE unique_key = %(unique)s::text AND closed_at IS NULL")
_LIST_OF_PARENT = _among("SELECT id AS job_id FROM {jobs} WHERE parent_id = %(parent_id)s")
_OLD = """
  SELECT id AS job_id FROM {jobs} WHERE created_at < now() - make_interval(secs => %(older_s)s) ORDER BY created_at
  LIMIT """
_LIST_OLD = _among(f"{_OLD}{FEW}")
_YOUNG = f"""
  SELECT id AS job_id FROM {{jobs}} WHERE created_at >= {_SINCE} ORDER BY created_at DESC
  LIMIT """
_LIST_YOUNG = _among(f"{_YOUNG}{FEW}")
_LIST_QUEUED = _in_order(f"""
SELECT {HANDLE} FROM {{jobs}} j
WHERE j.id > %(after)s AND j.id < %(before)s AND j.id IN (
    SELECT m.job_id FROM {{messages}} m WHERE m.queue = %(queue)s UNION SELECT t.job_id FROM {{timers}} t)
  AND {_STATUSES}{_OTHERS} ORDER BY j.id @order LIMIT %(limit)s""")
_LIST_QUEUED_ALONG = _along(
    "SELECT job_id FROM {messages} WHERE queue = %(queue)s", "SELECT job_id FROM {timers} WHERE true"
)
_ALONG_FAILED = "SELECT job_id FROM {dead} WHERE true"
_LIST_FAILED = _along(_ALONG_FAILED)
_ALONG_TAG = "SELECT job_id FROM {tags} WHERE tag = %(tag)s::text"
_LIST_TAGGED = _along(_ALONG_TAG)
_ALONG_BATCH = "SELECT job_id FROM {batch_members} WHERE batch_id = %(batch_id)s::bigint AND job_id IS NOT NULL"
_LIST_OF_BATCH = _along(_ALONG_BATCH, also=_TAGGED)
_ARE_MANY_CHILDREN = Statement(f"""
SELECT count(*) > {SMALL} AS many FROM (
  SELECT FROM {{jobs}} WHERE parent_id = %(parent_id)s ORDER BY parent_id, name LIMIT {SMALL} + 1) few""")
_ARE_MANY_OLD = Statement(f"SELECT count(*) > {FEW} AS many FROM ({_OLD}{FEW} + 1) few")
_ARE_MANY_YOUNG = Statement(f"SELECT count(*) > {FEW} AS many FROM ({_YOUNG}{FEW} + 1) few")
_ARE_MANY_TIMERS = Statement(f"""
SELECT count(*) > {SMALL} AS many FROM (SELECT FROM {{timers}} ORDER BY due_at LIMIT {SMALL} + 1) few""")


def _reach(order: str) -> Mapping[str, Statement]:
    """Find the last id of those that `look` goes through; none if there are fewer."""
    return _in_order(f"""
SELECT job_id FROM ({order}) o WHERE job_id > %(after)s AND job_id < %(before)s
ORDER BY job_id @order OFFSET {LOOKED - 1} LIMIT 1""")


_REACH = _reach("SELECT id AS job_id FROM {jobs}")
_REACH_FAILED = _reach(_ALONG_FAILED)
_REACH_TAGGED = _reach(_ALONG_TAG)
_REACH_OF_BATCH = _reach(_ALONG_BATCH)
_REACHES = (
    (_LIST, _REACH),
    (_LIST_FAILED, _REACH_FAILED),
    (_LIST_TAGGED, _REACH_TAGGED),
    (_LIST_OF_BATCH, _REACH_OF_BATCH),
)
"""What reads on until enough match, and how far `look` lets it read."""


def look(
    executor: Reader, which: Filters, *, limit: int, newest_first: bool = False
) -> tuple[Sequence[Any], int | None]:
    """Read up to `limit` matching jobs among the next `LOOKED`.

    Returns also the id at which to go on; None at the end.
    """
    order, way = "newest" if newest_first else "oldest", _way_to(executor, which, is_bounded=True)
    reach = next((first(executor.run(reach[order], **which.parameters)) for of, reach in _REACHES if of is way), None)
    if reach is not None:
        end = {"after": reach.job_id - 1} if newest_first else {"before": reach.job_id + 1}
        which = replace(which, **end)
    rows = executor.run(way[order], **which.parameters, limit=limit)
    return rows, rows[-1].id if len(rows) == limit else None if reach is None else reach.job_id


def page(executor: Reader, which: Filters, *, limit: int, newest_first: bool = False) -> Sequence[Any]:
    """Read the next `limit` jobs that match, by id, the oldest or the newest first.

    Running jobs, the children of one job, the open job of a unique key and up to `FEW` jobs that are old enough or
    young enough are found by an index. For failed jobs and the queued jobs of one queue, the query reads their index
    entries; for other filters all jobs, until enough match. If there are very many timers, it reads all of them and the
    whole queue.
    """
    statement = _way_to(executor, which)["newest" if newest_first else "oldest"]
    return executor.run(statement, **which.parameters, limit=limit)


def _way_to(executor: Reader, which: Filters, *, is_bounded: bool = False) -> Mapping[str, Statement]:
    """Return the statements, for both orders, that read least to find these jobs.

    With `is_bounded` they read little, or are among `_REACHES`.
    """

    def are_many(statement: Statement) -> bool:
        return bool(executor.run(statement, **which.parameters)[0].many)

    wanted = set(which.statuses or ())
    if which.unique is not None:
        return _LIST_OF_KEY
    if (which.batch_id is not None or which.tag is not None) and wanted != {"running"}:
        return _LIST_TAGGED if which.batch_id is None else _LIST_OF_BATCH
    if which.parent_id is not None and which.tag is None and not are_many(_ARE_MANY_CHILDREN):
        return _LIST_OF_PARENT
    if wanted == {"running"}:
        return _LIST_RUNNING
    if (which.since is not None or which.since_s is not None) and not are_many(_ARE_MANY_YOUNG):
        return _LIST_YOUNG
    if wanted == {"queued"} and which.queue is not None:
        are_many_timers = are_many(_ARE_MANY_TIMERS)
        is_long = are_many_timers or (is_bounded and not waiting.is_short(executor, which.queue))
        return _LIST_QUEUED_ALONG if not is_long else _LIST if is_bounded else _LIST_QUEUED
    if wanted == {"failed"}:
        return _LIST_FAILED
    if which.older_s is not None and not are_many(_ARE_MANY_OLD):
        return _LIST_OLD
    return _LIST


_COUNT = {
    column: Statement(f"SELECT j.{column} AS key, count(*) AS jobs FROM {{jobs}} j GROUP BY 1 ORDER BY 1")
    for column in ("status", "task", "queue", "created_by")
}


def count(executor: Reader, by: str) -> dict[str, int]:
    """Count jobs by one of their columns; reads the whole table."""
    return {row.key: row.jobs for row in executor.run(_COUNT[by])}


def count_matching(executor: Reader, which: Filters, by: str) -> dict[str, int]:
    """Count the jobs that match by one of their columns; finds them as `page` does, and reads them all."""
    statement = _counting(_way_to(executor, which)["oldest"], by)
    return {row.key: row.jobs for row in executor.run(statement, **which.parameters, limit=MOST)}


@lru_cache
def _counting(listing: Statement, by: str) -> Statement:
    return Statement(f"SELECT c.{by} AS key, count(*) AS jobs FROM ({listing.text}) c GROUP BY 1 ORDER BY 1")


COUNTED_BY = tuple(_COUNT)


_KNOWS_QUEUE = Statement("""
SELECT EXISTS (SELECT FROM {messages} WHERE queue = %(queue)s)
  OR EXISTS (SELECT FROM {registry} WHERE queue = %(queue)s)
  OR EXISTS (SELECT FROM {dead} WHERE queue = %(queue)s) OR EXISTS (SELECT FROM {jobs} WHERE queue = %(queue)s)
  AS found""")


_KNOWS_TASK = Statement("""
SELECT EXISTS (SELECT FROM {messages} WHERE task = %(task)s) OR EXISTS (SELECT FROM {jobs} WHERE task = %(task)s)
  AS found""")


def knows_task(executor: Reader, task: str) -> bool:
    """Tell whether any job, or durable task that waits or runs, has this task; reads all if none has."""
    return bool(executor.run(_KNOWS_TASK, task=task)[0].found)


def knows_queue(executor: Reader, queue: str) -> bool:
    """Tell whether any row of the store belongs to this queue; reads all jobs if none does."""
    return bool(executor.run(_KNOWS_QUEUE, queue=queue)[0].found)
