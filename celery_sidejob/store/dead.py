"""Rows of `dead`: work that needs a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..model.checks import MOST
from ..model.retention import Retention
from .statement import Reader, Statement, Transaction, first

_BURY = Statement("""
WITH before AS (DELETE FROM {dead} WHERE job_id = %(job_id)s)
INSERT INTO {dead} (job_id, task_id, task, queue, reason, error, traceback, retries, given_group, payload)
SELECT j.id, %(task_id)s, j.task, j.queue, %(reason)s, %(error)s, %(traceback)s, %(retries)s, %(given_group)s,
  json_build_object('v', 1, 'args', j.args, 'kwargs', j.kwargs, 'wake_pending', %(wake_pending)s::boolean,
    'loss', %(loss)s::json)
FROM {jobs} j WHERE j.id = %(job_id)s RETURNING id""")


def bury(
    executor: Transaction, job_id: int, *, task_id: str | None, reason: str, error: str, traceback: str | None,
    retries: int, wake_pending: bool, given_group: str | None = None, loss: str | None = None,
) -> int:  # fmt: skip
    """Enter a job in the dead set; an older entry of the same job is replaced.

    Its failure group is `given_group`, or else the class that `error` begins with. `loss`: why its last run was lost,
    as JSON text.
    """
    found = executor.run(
        _BURY, job_id=job_id, task_id=task_id, reason=reason, error=error, traceback=traceback, retries=retries,
        wake_pending=wake_pending, given_group=given_group, loss=loss,
    )  # fmt: skip
    return int(found[0].id)


_COLUMNS = (
    "id, job_id, task_id, task, queue, reason, error, traceback, retries, died_at, failure_group, "
    "payload::text AS payload"
)
_MATCHING = """(%(queue)s::text IS NULL OR queue = %(queue)s)
  AND (%(reason)s::text IS NULL OR reason = %(reason)s)"""
_PAGE = Statement(f"""
SELECT {_COLUMNS} FROM {{dead}} WHERE id > %(after)s AND {_MATCHING} ORDER BY id LIMIT %(limit)s""")
# Not `task = ...`: the primary key is in that order too, and a task with few entries would be looked for among all.
_PAGE_OF_TASK = Statement(f"""
SELECT {_COLUMNS} FROM {{dead}} WHERE task BETWEEN %(task)s AND %(task)s AND id > %(after)s AND {_MATCHING}
ORDER BY task, id LIMIT %(limit)s""")
# The same for groups, whose index gives both orders.
_OF_GROUP = f"""
SELECT {_COLUMNS} FROM {{dead}} WHERE failure_group BETWEEN %(failure_group)s AND %(failure_group)s
  AND (%(task)s::text IS NULL OR task = %(task)s) AND {_MATCHING}"""
_PAGE_OF_GROUP = Statement(_OF_GROUP + """ AND id > %(after)s ORDER BY failure_group, id LIMIT %(limit)s""")
_NEWEST_OF_GROUP = Statement(
    _OF_GROUP + """ AND id < %(before)s ORDER BY failure_group DESC, id DESC LIMIT %(limit)s"""
)
_GROUPS = Statement("""
SELECT failure_group AS "group", count(*) AS entries FROM {dead} GROUP BY 1 ORDER BY 2 DESC, 1""")
_TASKS = Statement("""
WITH RECURSIVE t(task) AS (
  (SELECT task FROM {dead} ORDER BY task LIMIT 1)
  UNION ALL SELECT (SELECT d.task FROM {dead} d WHERE d.task > t.task ORDER BY d.task LIMIT 1) FROM t
  WHERE t.task IS NOT NULL)
SELECT task FROM t WHERE task IS NOT NULL""")
_LAST = Statement("SELECT coalesce(max(id), 0) AS last FROM {dead}")
# CASE: Postgres would guess that nearly all entries are of the tasks to be left out, and sort the rest.
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
    """What may go of the dead set: what is older than `age_s`, or whose id is not above `below`.

    `tasks` have bounds of their own instead, {task: (age_s, below)}.
    """

    age_s: float | None
    below: int = 0
    tasks: Mapping[str, tuple[float | None, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, executor: Reader, retention: Retention) -> Bounds:
        """Read the bounds of a retention: the ids beyond the newest entries of which a number is kept."""

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


# Sub-selects and not EXISTS, which Postgres may answer from a hash of all packets and ports.
_OLD_JOBS = Statement(f"""
SELECT d.id, d.job_id IS NOT NULL AND {OLD}
    AND (j.parent_id IS NULL OR (j.retention_s IS NOT NULL OR j.retention_keep IS NOT NULL) AND EXISTS (
        SELECT FROM {{jobs}} p WHERE p.id = j.parent_id AND p.status IN ('suspended', 'completed', 'failed')
          AND p.ran_at > j.ended_at)
      AND (SELECT k.id FROM {{ports}} o JOIN {{packets}} k ON k.port_id = o.id WHERE o.job_id = j.id LIMIT 1) IS NULL
    ) AS goes,
  d.job_id, {OLD} AS old
FROM (SELECT id, job_id, task, died_at FROM {{dead}} WHERE id > %(after)s ORDER BY id LIMIT %(limit)s) d
  {OWN} LEFT JOIN {{jobs}} j ON j.id = d.job_id ORDER BY d.id""")


def old_jobs(executor: Reader, *, after: int, bounds: Bounds, limit: int) -> tuple[list[int], int | None]:
    """Read the next `limit` entries; return the ids of the jobs of those that are beyond the bounds.

    A job with a parent is among them only if its task has a retention, the parent has run since and rests, and no
    packet waits on the job's ports; others are kept by their ancestors. Also returns the entry to continue after: None
    at the end. Without bounds of single tasks it is reached where no entry is old, because ids grow with time.
    """
    page = executor.run(_OLD_JOBS, after=after, limit=limit, **bounds.parameters)
    found = [row.job_id for row in page if row.goes]
    goes_on = len(page) == limit and (any(row.old for row in page) or bool(bounds.tasks))
    return found, page[-1].id if goes_on else None


_EXPIRED = Statement(f"""
SELECT d.job_id FROM {{dead}} d {OWN} WHERE d.job_id = ANY(%(job_ids)s::bigint[]) AND {OLD}""")


def expired(executor: Reader, job_ids: Iterable[int], *, bounds: Bounds) -> set[int]:
    """Read which of these jobs have an entry that is beyond the bounds."""
    return {row.job_id for row in executor.run(_EXPIRED, job_ids=list(job_ids), **bounds.parameters)}


def page(
    executor: Reader, *, after: int, limit: int, failure_group: str | None = None, task: str | None = None,
    queue: str | None = None, reason: str | None = None,
) -> Sequence[Any]:  # fmt: skip
    """Read the next matching entries by id; looks through those of the group, the task, or else all."""
    which = {"after": after, "limit": limit, "queue": queue, "reason": reason}
    if failure_group is not None:
        return executor.run(_PAGE_OF_GROUP, failure_group=failure_group, task=task, **which)
    if task is not None:
        return executor.run(_PAGE_OF_TASK, task=task, **which)
    return executor.run(_PAGE, **which)


def newest_of_group(
    executor: Reader, *, before: int | None, limit: int, failure_group: str, task: str | None, queue: str | None,
    reason: str | None,
) -> Sequence[Any]:  # fmt: skip
    """Read entries of a group, the newest first, those before an id; looks through the group until `limit` match."""
    return executor.run(
        _NEWEST_OF_GROUP, before=MOST if before is None else before, limit=limit, failure_group=failure_group,
        task=task, queue=queue, reason=reason,
    )  # fmt: skip


def groups(executor: Reader) -> dict[str, int]:
    """Count all entries by their failure group; reads the index of the groups as a whole."""
    return {row.group: row.entries for row in executor.run(_GROUPS)}


def tasks(executor: Reader) -> list[str]:
    """Read the tasks that have entries, one look into the index for each."""
    return [row.task for row in executor.run(_TASKS)]


def last_id(executor: Reader) -> int:
    """Read the id of the newest entry; 0 without any."""
    return int(executor.run(_LAST)[0].last)


def old_page(
    executor: Reader, *, after: int, last: int, bounds: Bounds, limit: int, **which: str | None
) -> Sequence[Any]:  # fmt: skip
    """Read the next entries up to `last` that match and are beyond the bounds."""
    return executor.run(_OLD_PAGE, after=after, last=last, limit=limit, **which, **bounds.parameters)


def count_old(executor: Reader, *, last: int, bounds: Bounds, **which: str | None) -> Any:
    """Count the entries that `old_page` reads, and those of jobs among them: (entries, jobs)."""
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


def count_matching(
    executor: Reader, *, failure_group: str | None, task: str | None, queue: str | None, reason: str | None
) -> int:
    """Count the entries that match; reads all, a million in a second."""
    which = {"failure_group": failure_group, "task": task, "queue": queue, "reason": reason}
    return int(executor.run(_COUNT_MATCHING, **which)[0].entries)


def there(executor: Reader, entry_ids: Iterable[int]) -> Sequence[Any]:
    """Read (id, task_id) of those of the entries that exist."""
    return executor.run(_THERE, ids=list(entry_ids))
