"""Rows of `dead`: work that needs a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..model.checks import MOST
from ..model.durable import Death
from ..model.retention import Retention
from .statement import Reader, Statement, Transaction, first
from .trees import SEEN_BY_PARENT

Which = Mapping[str, str | None]
"""Filters of entries: `failure_group`, `task`, `queue` and `reason`; None matches all entries."""
ALL: Which = {"failure_group": None, "task": None, "queue": None, "reason": None}

_BURY = Statement("""
WITH before AS (DELETE FROM {dead} WHERE job_id = %(job_id)s)
INSERT INTO {dead} (job_id, task_id, task, queue, reason, error, traceback, retries, given_group, payload)
SELECT j.id, %(task_id)s, j.task, j.queue, %(reason)s, %(error)s, %(traceback)s, %(retries)s, %(group)s,
  json_build_object('v', 1, 'args', j.args, 'kwargs', j.kwargs, 'wake_pending', %(wake_pending)s::boolean,
    'loss', %(loss)s::json)
FROM {jobs} j WHERE j.id = %(job_id)s RETURNING id""")


def bury(
    executor: Transaction,
    job_id: int,
    death: Death,
    *,
    task_id: str | None,
    wake_pending: bool = False,
    loss: str | None = None,
) -> int:
    """Enter a job in the dead set; an older entry of the same job is replaced.

    `loss`: why its last run was lost, as JSON text.
    """
    given = {"task_id": task_id, "wake_pending": wake_pending, "loss": loss, **asdict(death)}
    return int(executor.run(_BURY, job_id=job_id, **given)[0].id)


_COLUMNS = (
    "id, job_id, task_id, task, queue, reason, error, traceback, retries, died_at, failure_group, "
    "payload::text AS payload"
)
_MATCHING = """(%(queue)s::text IS NULL OR queue = %(queue)s)
  AND (%(reason)s::text IS NULL OR reason = %(reason)s)"""
LOOKED = 10_000
"""How many entries `look` goes through at once."""
# Not `task = ...`: the primary key has that order too, and a task with few entries would be searched among all.
_INDEXES = {
    "all": ("true", "id {0}"),
    "task": ("task BETWEEN %(task)s AND %(task)s", "task {0}, id {0}"),
    "group": ("failure_group BETWEEN %(failure_group)s AND %(failure_group)s", "failure_group {0}, id {0}"),
}
_OLDEST, _NEWEST = (
    {
        name: Statement(f"""
SELECT {_COLUMNS} FROM {{dead}} WHERE {of} AND id < %(before)s AND id > %(after)s
  AND (%(task)s::text IS NULL OR task = %(task)s) AND {_MATCHING} ORDER BY {order.format(way)} LIMIT %(limit)s""")
        for name, (of, order) in _INDEXES.items()
    }
    for way in ("ASC", "DESC")
)
_REACH = {
    name: Statement(f"""
SELECT id FROM {{dead}} WHERE {of} AND id < %(before)s ORDER BY {order.format("DESC")} OFFSET {LOOKED - 1} LIMIT 1""")
    for name, (of, order) in _INDEXES.items()
}
_GROUPS = Statement("""
SELECT failure_group AS "group", count(*) AS entries FROM {dead} GROUP BY 1 ORDER BY 2 DESC, 1""")
_TASKS = Statement("""
WITH RECURSIVE t(task) AS (
  (SELECT task FROM {dead} ORDER BY task LIMIT 1)
  UNION ALL SELECT (SELECT d.task FROM {dead} d WHERE d.task > t.task ORDER BY d.task LIMIT 1) FROM t
  WHERE t.task IS NOT NULL)
SELECT task FROM t WHERE task IS NOT NULL""")
_LAST = Statement("SELECT coalesce(max(id), 0) AS last FROM {dead}")
# CASE: Postgres would guess that nearly all entries have the tasks to be skipped, and sort the rest.
_BEFORE = Statement("""
SELECT id FROM {dead} WHERE CASE WHEN task = ANY(%(but)s::text[]) THEN false ELSE true END
ORDER BY id DESC OFFSET %(keep)s LIMIT 1""")
_BEFORE_OF_TASK = Statement("""
SELECT id FROM {dead} WHERE task BETWEEN %(task)s AND %(task)s ORDER BY task DESC, id DESC OFFSET %(keep)s LIMIT 1""")
OLD = """(
  CASE WHEN own.task IS NULL THEN d.id <= %(below)s OR d.died_at < now() - make_interval(secs => %(age_s)s)
    ELSE d.id <= own.below OR d.died_at < now() - make_interval(secs => own.age_s) END) IS TRUE"""
"""Whether an entry `d` is beyond the bounds, as SQL; with `OWN` and the parameters of `Bounds`."""
OWN = """LEFT JOIN unnest(%(tasks)s::text[], %(ages)s::double precision[], %(belows)s::bigint[])
    AS own(task, age_s, below) ON own.task = d.task"""
_MATCHING_ALL = f"""(%(failure_group)s::text IS NULL OR failure_group = %(failure_group)s)
  AND (%(task)s::text IS NULL OR task = %(task)s) AND {_MATCHING}"""
_OLD_MATCHING = f"""
FROM (SELECT {_COLUMNS} FROM {{dead}} WHERE id <= %(last)s AND {_MATCHING_ALL}) d {OWN} WHERE {OLD}"""
_OLD_PAGE = Statement(f"SELECT d.* {_OLD_MATCHING} AND d.id > %(after)s ORDER BY d.id LIMIT %(limit)s")
_COUNT_OLD = Statement(f"SELECT count(*) AS entries, count(d.job_id) AS jobs {_OLD_MATCHING}")
_DELETE_MESSAGE = Statement("DELETE FROM {dead} WHERE id = %(id)s AND job_id IS NULL RETURNING id")
_GET = Statement(f"SELECT {_COLUMNS} FROM {{dead}} WHERE id = %(id)s")
_OF_JOB = Statement(f"SELECT {_COLUMNS} FROM {{dead}} WHERE job_id = %(job_id)s")
_OF_TASK = Statement(f"SELECT {_COLUMNS} FROM {{dead}} WHERE task_id = %(task_id)s ORDER BY id DESC LIMIT 1")
_COUNT = Statement("SELECT count(*) AS entries FROM {dead}")
_COUNT_MATCHING = Statement(f"SELECT count(*) AS entries FROM {{dead}} WHERE {_MATCHING_ALL}")
_THERE = Statement("SELECT id, task_id FROM {dead} WHERE id = ANY(%(ids)s::bigint[]) ORDER BY id")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of the dead set: an entry may be removed if it is older than `age_s`, or if its id is at most `below`.

    `tasks` have their own bounds instead, {task: (age_s, below)}.
    """

    age_s: float | None
    below: int = 0
    tasks: Mapping[str, tuple[float | None, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, executor: Reader, retention: Retention) -> Bounds:
        """Read the bounds of a retention: for a number of kept entries, the id just below the newest ones."""

        def below(statement: Statement, keep: int | None, **which: Any) -> int:
            found = [] if keep is None else executor.run(statement, keep=keep, **which)
            return found[0].id if found else 0

        tasks = {
            task: (own.age_s, below(_BEFORE_OF_TASK, own.keep, task=task)) for task, own in retention.tasks.items()
        }
        return cls(retention.age_s, below(_BEFORE, retention.keep, but=list(tasks)), tasks)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of `OLD` and `OWN`."""
        ages, belows = ([own[column] for own in self.tasks.values()] for column in (0, 1))
        return {"age_s": self.age_s, "below": self.below, "tasks": list(self.tasks), "ages": ages, "belows": belows}


# Sub-selects rather than EXISTS, which Postgres may compute from a hash of all packets and ports.
_OLD_JOBS = Statement(f"""
SELECT d.id, d.job_id IS NOT NULL AND {OLD}
    AND (j.parent_id IS NULL OR (j.retention_s IS NOT NULL OR j.retention_keep IS NOT NULL) AND {SEEN_BY_PARENT}
      AND (SELECT k.id FROM {{ports}} o JOIN {{packets}} k ON k.port_id = o.id WHERE o.job_id = j.id LIMIT 1) IS NULL
    ) AS goes,
  d.job_id, {OLD} AS old
FROM (SELECT id, job_id, task, died_at FROM {{dead}} WHERE id > %(after)s ORDER BY id LIMIT %(limit)s) d
  {OWN} LEFT JOIN {{jobs}} j ON j.id = d.job_id ORDER BY d.id""")


def old_jobs(executor: Reader, *, after: int, bounds: Bounds, limit: int) -> tuple[list[int], int | None]:
    """Read the next `limit` entries; return the ids of the jobs whose entries are beyond the bounds.

    A job with a parent is among them only if its task has a retention, no packet waits on the job's ports, and
    `SEEN_BY_PARENT`; others are kept by their ancestors. Also returns the entry to continue after: None at the end.
    Without bounds of single tasks the end is the first entry that is not old, because ids grow with time.
    """
    page = executor.run(_OLD_JOBS, after=after, limit=limit, **bounds.parameters)
    found = [row.job_id for row in page if row.goes]
    goes_on = len(page) == limit and (any(row.old for row in page) or bool(bounds.tasks))
    return found, page[-1].id if goes_on else None


_EXPIRED = Statement(f"""
SELECT d.job_id FROM {{dead}} d {OWN} WHERE d.job_id = ANY(%(job_ids)s::bigint[]) AND {OLD}""")


def expired(executor: Reader, job_ids: Iterable[int], *, bounds: Bounds) -> set[int]:
    """Read which of these jobs have an entry beyond the bounds."""
    return {row.job_id for row in executor.run(_EXPIRED, job_ids=list(job_ids), **bounds.parameters)}


def page(executor: Reader, *, after: int, limit: int, which: Which = ALL) -> Sequence[Any]:
    """Read the next matching entries by id; searches those of the group, of the task, or else all."""
    return executor.run(_OLDEST[_index(which)], before=MOST, after=after, limit=limit, **which)


def newest(executor: Reader, *, before: int | None, limit: int, which: Which, after: int = 0) -> Sequence[Any]:
    """Read matching entries, the newest first; reads those of the group, the task, or else all, until enough match."""
    before = MOST if before is None else before
    return executor.run(_NEWEST[_index(which)], before=before, after=after, limit=limit, **which)


def look(executor: Reader, *, before: int | None, limit: int, which: Which) -> tuple[Sequence[Any], int | None]:
    """Read up to `limit` matching entries among the next `LOOKED`, the newest first.

    Returns also the id before which to go on; None at the end.
    """
    reach = first(executor.run(_REACH[_index(which)], before=MOST if before is None else before, **which))
    rows = newest(executor, before=before, after=0 if reach is None else reach.id - 1, limit=limit, which=which)
    return rows, rows[-1].id if len(rows) == limit else None if reach is None else reach.id


def _index(which: Which) -> str:
    return "group" if which["failure_group"] is not None else "all" if which["task"] is None else "task"


def groups(executor: Reader) -> dict[str, int]:
    """Count all entries by their failure group; reads the index of the groups as a whole."""
    return {row.group: row.entries for row in executor.run(_GROUPS)}


def tasks(executor: Reader) -> list[str]:
    """Read the tasks that have entries, by one search of the index for each."""
    return [row.task for row in executor.run(_TASKS)]


def last_id(executor: Reader) -> int:
    """Read the id of the newest entry; 0 without any."""
    return int(executor.run(_LAST)[0].last)


def old_page(executor: Reader, *, after: int, last: int, bounds: Bounds, limit: int, which: Which) -> Sequence[Any]:
    """Read the next matching entries up to `last` that are beyond the bounds."""
    return executor.run(_OLD_PAGE, after=after, last=last, limit=limit, **which, **bounds.parameters)


def count_old(executor: Reader, *, last: int, bounds: Bounds, which: Which) -> Any:
    """Count the entries that `old_page` reads, and the jobs among them: (entries, jobs)."""
    return executor.run(_COUNT_OLD, last=last, **which, **bounds.parameters)[0]


def delete_message(executor: Transaction, entry_id: int) -> bool:
    """Remove the entry of an ordinary task, which has no other rows."""
    return bool(executor.run(_DELETE_MESSAGE, id=entry_id))


def get(executor: Reader, entry_id: int) -> Any | None:
    """Read one entry."""
    return first(executor.run(_GET, id=entry_id))


def of_job(executor: Reader, job_id: int) -> Any | None:
    """Read a job's entry."""
    return first(executor.run(_OF_JOB, job_id=job_id))


def of_task(executor: Reader, task_id: str) -> Any | None:
    """Read the newest entry of this task id."""
    return first(executor.run(_OF_TASK, task_id=task_id))


def count(executor: Reader) -> int:
    """Count the entries."""
    return int(executor.run(_COUNT)[0].entries)


def count_matching(executor: Reader, *, which: Which) -> int:
    """Count the entries that match; reads all entries, a million in a second."""
    return int(executor.run(_COUNT_MATCHING, **which)[0].entries)


def there(executor: Reader, entry_ids: Iterable[int]) -> Sequence[Any]:
    """Read (id, task_id) of the entries that exist."""
    return executor.run(_THERE, ids=list(entry_ids))
