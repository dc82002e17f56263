"""Rows of `jobs`: the nodes of the graph. A job's row is its only lock and alone decides on its life.

Rows of `aliases`, `tags` and `tracked`: what people find a job by. Rows of `state` and `progress`: the user's JSON on a
job, a row for each key; and how far a run has come.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..model.changes import NewJob, Stage
from ..model.columns import COLUMNS, SHOWN
from ..model.errors import DuplicateError, InvalidValueError
from ..model.names import child_name_taken
from .outbox.arming import FIRST_CHECK_S, OPENS_AT, armed
from .outbox.references import withdrawn
from .statement import Autocommit, Frequent, Reader, Statement, Transaction, first, first_value, violated

READ = ", ".join(
    f"j.{column.name}::text AS {column.name}" if column.is_json else f"j.{column.name}" for column in SHOWN.values()
)
"""The given columns that handles and runs read."""

ROW = f"""j.id, {READ}, j.status, j.changes, j.created_at, j.ran_at, j.ended_at, j.run_no,
  j.unit_no, j.run_kind, j.worker_id, j.losses, j.retries, j.wakes > j.wakes_taken AS asked_again, j.has_steps,
  j.error::text AS error"""
"""The columns of a job's own row that handles and runs read."""

HANDLE = f"""{ROW},
  (SELECT a.task_id FROM {{askings}} a WHERE a.job_id = j.id
    ORDER BY a.closed_at DESC NULLS FIRST, a.opened_at DESC LIMIT 1) AS task_id,
  (SELECT a.unique_key FROM {{askings}} a WHERE a.job_id = j.id AND a.closed_at IS NULL) AS unique_key"""

_NEXT_IDS = Statement("SELECT nextval('{jobs_id_seq}'::regclass) AS id FROM generate_series(1, %(count)s)")


def next_ids(executor: Autocommit | Transaction, count: int) -> list[int]:
    """Draw ids for new jobs. Ids drawn and not used are gaps; no id is ever used twice."""
    return [row.id for row in executor.run(_NEXT_IDS, count=count)]


_COLUMN_NAMES = frozenset(column.name for column in COLUMNS)
_NAMES = ", ".join(column.name for column in COLUMNS)
_GIVEN = {
    "id": "bigint",
    **{column.name: "text" if column.is_json else column.sql for column in COLUMNS},
    "task_id": "text",
    "options": "text",
    "unique_key": "text",
    "due_at": "timestamptz",
    "wait_s": "double precision",
    "slot": "smallint",
}
"""The given columns of a new job, and their types."""
_NOTHING: dict[str, Any] = dict.fromkeys(_GIVEN)
_VALUES = ", ".join(f"{column.name}::json" if column.is_json else column.name for column in COLUMNS)


def _insert(given: str) -> Statement:
    return Frequent(
        f"""
WITH given AS ({given}),
r AS (
  SELECT coalesce(id, nextval('{{jobs_id_seq}}'::regclass)) AS job_id,
    (due_at > now() OR wait_s > 0::double precision) IS TRUE AS later, *
  FROM given),
j AS (
  INSERT INTO {{jobs}} (id, {_NAMES})
  SELECT job_id, {_VALUES} FROM r ORDER BY job_id),
a AS (
  INSERT INTO {{askings}} (task_id, job_id, options, unique_key)
  SELECT task_id, job_id, options::json, unique_key FROM r),
t AS (
  INSERT INTO {{timers}} (job_id, due_at, ask, accepted)
  SELECT job_id, coalesce(due_at, now() + make_interval(secs => wait_s)), 'run', true FROM r WHERE later),"""
        + armed(
            "(SELECT job_id AS id, task_id, queue, priority, limit_key, 0::bigint AS run_no, NULL AS unit_no, blocked, "
            "pool, pool_weight, pool_runs, slot, due_at FROM r WHERE NOT later) j",
            task_id="j.task_id",
            opens_at=None,
            cut_short=None,
            first_check_s="%(first_check_s)s",
            slot="j.slot",
            wait_s="least(extract(epoch FROM j.due_at - now())::double precision, 0::double precision)",
            waits="true",
        )
        + """
SELECT r.job_id, r.task_id, armed.for_run FROM r LEFT JOIN armed ON armed.job_id = r.job_id ORDER BY r.job_id""",
    )


_INSERT = _insert(
    "SELECT * FROM json_to_recordset(%(rows)s::json) AS "
    f"r({', '.join(f'{name} {kind}' for name, kind in _GIVEN.items())})"
)
_INSERT_ONE = _insert("SELECT " + ", ".join(f"%({name})s::{kind} AS {name}" for name, kind in _GIVEN.items()))
"""For one new job: reading it from JSON would take a tenth of the statement's time."""

MANY = 64
"""From this many new jobs on, the process needs noticeable time to publish them all."""
FIRST_CHECK_OF_MANY_S = 10.0


def insert(executor: Transaction, new: Sequence[NewJob], *, check_interval_s: float) -> Sequence[Any]:
    """Create jobs, each with its open asking and its message, or with its timer if it runs later.

    A job without an id gets the next one. Returns (job_id, task_id, for_run) in the order of the ids; `for_run` is None
    if no message is to be published now. The jobs must be ordered so that a parent precedes its children. Raises
    ChildNameTakenError, DuplicateError or InvalidValueError for a name, a key or a task id that another row has.
    """
    rows = [
        {
            **{name: value for name, value in vars(job).items() if value is not None and name in _COLUMN_NAMES},
            "id": job.id or None,
            "task_id": job.task_id,
            "options": job.options,
            "unique_key": None if job.unique is None else job.unique.key,
            "due_at": job.due_at.isoformat() if job.due_at else None,
            "wait_s": job.wait_s,
            "slot": job.slot,
        }
        for job in new
    ]
    first_check_s = FIRST_CHECK_S if len(new) < MANY else FIRST_CHECK_OF_MANY_S
    checks = {"check_interval_s": check_interval_s, "first_check_s": first_check_s}
    try:
        if len(rows) == 1:
            return executor.run(_INSERT_ONE, **checks, **(_NOTHING | rows[0]))
        return executor.run(_INSERT, rows=json.dumps(rows), **checks)
    except Exception as error:
        taken = _taken(violated(error), new)
        if taken is None:
            raise
        raise taken from error


def _taken(constraint: str | None, new: Sequence[NewJob]) -> Exception | None:
    """Return our own error for a name or a task id that another row has."""
    if constraint == "jobs_parent_id_name_key":
        return child_name_taken(*((job.parent_id, job.name) for job in new))
    if constraint == "askings_unique_key_idx":
        keys = ", ".join(repr(job.unique.key) for job in new if job.unique is not None)
        return DuplicateError(
            f"An open job that your transaction does not see yet has one of the unique keys {keys}: repeat the "
            "transaction."
        )
    if constraint in ("askings_pkey", "messages_pkey"):
        ids = ", ".join(job.task_id for job in new[:3])
        return InvalidValueError(f"Another asking has this task_id already: {ids}. Leave it out, or give a new one.")
    return None


_LOCKED = """
SELECT id, status, task, queue, priority, parent_id, run_no, unit_no, worker_id, run_kind, terminate_tree, losses,
  max_losses, pool, ran_at, has_steps FROM {jobs} WHERE id = ANY(%(ids)s::bigint[]) ORDER BY id"""
_LOCK = Frequent(f"{_LOCKED} FOR NO KEY UPDATE")
_LOCK_FREE = Frequent(f"{_LOCKED} FOR NO KEY UPDATE SKIP LOCKED")


def lock(executor: Transaction, ids: Iterable[int], *, waits: bool = True) -> dict[int, Any]:
    """Lock jobs in ascending order of their ids and return their rows; an id without a job is missing from the result.

    Every transaction that asks, commits, ends or frees a run calls this first and once: a second, later lock of a
    lower id could deadlock. Without `waits`, jobs that are already locked are missing too; the sweeper tries again.
    """
    return {row.id: row for row in executor.run(_LOCK if waits else _LOCK_FREE, ids=sorted(set(ids)))}


_IS_LOCKED = Statement("""
SELECT b.id FROM {jobs} b WHERE b.id = %(id)s AND NOT EXISTS (
  SELECT FROM {jobs} x WHERE x.id = b.id FOR NO KEY UPDATE OF x SKIP LOCKED)""")


def is_locked(executor: Transaction, job_id: int) -> bool:
    """Tell, without waiting, whether a transaction has the job locked at this moment."""
    return bool(executor.run(_IS_LOCKED, id=job_id))


_KEEP = "SELECT id FROM {jobs} WHERE id = ANY(%(ids)s::bigint[]) ORDER BY id FOR KEY SHARE"
_KEEP_ALL, _KEEP_FREE = Statement(_KEEP), Statement(f"{_KEEP} SKIP LOCKED")


def keep(executor: Transaction, ids: Iterable[int], *, waits: bool) -> set[int]:
    """Keep jobs from being deleted until the commit, and return their ids.

    It `waits` for transactions that have locked them for a deletion, or else leaves out such jobs.
    """
    return {row.id for row in executor.run(_KEEP_ALL if waits else _KEEP_FREE, ids=list(ids))}


_EXCLUSIVELY = "SELECT id, task, status FROM {jobs} WHERE id = ANY(%(ids)s::bigint[]) ORDER BY id FOR UPDATE"
_LOCK_EXCLUSIVELY = Statement(_EXCLUSIVELY)
_LOCK_FREE_EXCLUSIVELY = Statement(f"{_EXCLUSIVELY} SKIP LOCKED")


def lock_exclusively(executor: Transaction, ids: Iterable[int], *, waits: bool = True) -> dict[int, Any]:
    """Lock jobs as `lock` does, also against new children, ports and timers: for delete, adopt and disown."""
    statement = _LOCK_EXCLUSIVELY if waits else _LOCK_FREE_EXCLUSIVELY
    return {row.id: row for row in executor.run(statement, ids=sorted(set(ids)))}


LONGEST_WAIT_S = 0.02
_WAIT_NO_LONGER = Statement("SELECT set_config('lock_timeout', %(lock_ms)s::text, true)")


def wait_no_longer(executor: Transaction) -> None:
    """From now on no statement of this transaction waits longer than `LONGEST_WAIT_S` for a lock: see `RowsLocked`.

    Deletions that no caller has asked for call this once they have locked the jobs. The rows that go with a job may
    be locked by a transaction that does not lock the job: one that sets a key of its state, or reads a packet.
    """
    executor.run(_WAIT_NO_LONGER, lock_ms=str(round(LONGEST_WAIT_S * 1000)))


_PARENTS = Frequent("SELECT id, parent_id FROM {jobs} WHERE id = ANY(%(ids)s::bigint[])")


def parents(executor: Reader, ids: Iterable[int]) -> dict[int, int | None]:
    """Read the parents of jobs, without a lock: compare them again after locking."""
    return {row.id: row.parent_id for row in executor.run(_PARENTS, ids=sorted(set(ids)))}


_FIND = Statement(f"SELECT {HANDLE} FROM {{jobs}} j WHERE j.id = ANY(%(ids)s::bigint[]) ORDER BY j.id")


def find(executor: Reader, ids: Iterable[int]) -> Sequence[Any]:
    """Read jobs as handles show them, in the order of their ids."""
    return executor.run(_FIND, ids=list(ids))


_FIND_ALIAS = Statement(
    f"SELECT {HANDLE} FROM {{jobs}} j JOIN {{aliases}} x ON x.job_id = j.id WHERE x.name = %(name)s"
)


def find_by_alias(executor: Reader, name: str) -> Any | None:
    """Read the job that has this alias."""
    return first(executor.run(_FIND_ALIAS, name=name))


_FIND_TASK_ID = Statement(
    f"SELECT {HANDLE} FROM {{jobs}} j JOIN {{askings}} x ON x.job_id = j.id WHERE x.task_id = %(task_id)s"
)


def find_by_task_id(executor: Reader, task_id: str) -> Any | None:
    """Read the job that has an asking with this task id."""
    return first(executor.run(_FIND_TASK_ID, task_id=task_id))


_CHILDREN = Statement(f"SELECT {HANDLE} FROM {{jobs}} j WHERE j.parent_id = %(id)s ORDER BY j.id")


def children(executor: Reader, job_id: int) -> Sequence[Any]:
    """Read a job's children, oldest first."""
    return executor.run(_CHILDREN, id=job_id)


_CHILD = Statement("SELECT id FROM {jobs} WHERE parent_id = %(parent_id)s AND name = %(name)s")


def child(executor: Reader, parent_id: int, name: str) -> int | None:
    """Read the id of a job's child by its name."""
    return first_value(executor.run(_CHILD, parent_id=parent_id, name=name), int)


_SET_PARENT = Statement("UPDATE {jobs} SET parent_id = %(parent_id)s, name = %(name)s WHERE id = %(id)s")


def set_parent(executor: Transaction, job_id: int, *, parent_id: int | None, name: str | None) -> None:
    """Make the job a named child, or a root again."""
    executor.run(_SET_PARENT, id=job_id, parent_id=parent_id, name=name)


_REMEMBER_INPUTS = Statement("UPDATE {jobs} SET inputs_memo = %(memo)s::json WHERE id = %(id)s")


def remember_inputs(executor: Transaction, job_id: int, memo: str) -> None:
    """Record the defaults with which `for_inputs` was called."""
    executor.run(_REMEMBER_INPUTS, id=job_id, memo=memo)


_INPUTS_MEMO = Statement("SELECT inputs_memo::text AS memo FROM {jobs} WHERE id = %(id)s")


def inputs_memo(executor: Reader, job_id: int) -> str | None:
    """Read the defaults that `remember_inputs` stored."""
    found = executor.run(_INPUTS_MEMO, id=job_id)
    return found[0].memo if found else None


_VERSIONS = Statement("""
SELECT j.id, j.xmin::text || ' ' || j.xmax::text || ' ' || coalesce(p.told_at::text, '') AS version
FROM {jobs} j LEFT JOIN {progress} p ON p.job_id = j.id WHERE j.id = ANY(%(ids)s::bigint[])""")


def versions(executor: Reader, ids: Iterable[int]) -> dict[int, str]:
    """Read the version of each of these jobs: it differs after each transaction that has locked or changed the job."""
    return {row.id: row.version for row in executor.run(_VERSIONS, ids=list(ids))}


_OF_TASK = ("max_losses", "retention_s", "retention_keep", "rate_interval_s", "rate_burst", "rate_terminates")
"""The columns that follow from a task's own options."""
_OF_POOL = {"pool": "text", "pool_weight": "smallint", "pool_runs": "boolean"}
"""The columns of a job that determine its capacity pool, with their types."""
_OF_STAGE = f"""task = coalesce(%(task)s, j.task), queue = coalesce(%(queue)s, j.queue),
    priority = coalesce(%(priority)s::smallint, j.priority),
    args = coalesce(%(args)s::json, j.args), kwargs = coalesce(%(kwargs)s::json, j.kwargs),
    started = j.started AND %(task)s IS NULL,
    rate_opens_at = CASE WHEN %(task)s IS NULL THEN j.rate_opens_at END,
    {", ".join(f"{name} = CASE WHEN %(task)s IS NULL THEN j.{name} ELSE %({name})s END" for name in _OF_TASK)},
    {", ".join(f"{n} = CASE WHEN %(enters)s THEN %({n})s::{of} ELSE j.{n} END" for n, of in _OF_POOL.items())}"""
"""The changes of a stage in its job `j`, as SQL. A job with another task begins with that task's startup."""

_SET_STAGE = Statement(
    f"UPDATE {{jobs}} j SET {_OF_STAGE} WHERE j.id = %(id)s RETURNING j.task, j.queue, j.priority, j.pool"
)


def set_stage(executor: Transaction, job_id: int, stage: Stage) -> Any:
    """Give a locked job, whose run has just ended, its next stage; returns its (task, queue, priority, pool)."""
    return executor.run(_SET_STAGE, id=job_id, **_of_stage(stage))[0]


_WITHDRAWN = withdrawn("{messages} m", "m.job_id = %(id)s")

_MOVE = Statement(
    f"""
WITH changed AS (
  UPDATE {{jobs}} j SET {_OF_STAGE}, losses = 0,
    run_no = j.run_no + CASE WHEN EXISTS (SELECT FROM {{messages}} m WHERE m.job_id = j.id) THEN 1 ELSE 0 END
  WHERE j.id = %(id)s
  RETURNING j.id, j.task, j.queue, j.priority, j.status, j.unit_no, j.run_no, j.limit_key, j.rate_terminates,
    j.rate_opens_at, j.blocked, j.pool, j.pool_weight, j.pool_runs),/*!{_WITHDRAWN},*/"""
    + armed(
        "changed j JOIN {messages} held ON held.job_id = j.id",
        task_id="held.task_id",
        opens_at=OPENS_AT,
        cut_short="true",
        wait_s="extract(epoch FROM CASE WHEN NOT %(now)s THEN held.due_at ELSE now() END - now())::double precision",
        anew="true",
    )
    + """
SELECT changed.*, armed.task_id, armed.for_run, a.options::text AS options
FROM changed LEFT JOIN armed ON armed.job_id = changed.id LEFT JOIN {askings} a ON a.task_id = armed.task_id"""
)


def move(executor: Transaction, job_id: int, stage: Stage, *, now: bool, check_interval_s: float) -> Any | None:
    """Move a locked job that is in no run. A message that waits is armed anew, in its new queue, with its due time.

    Its losses do not count any more: they belong to its earlier task and queue.

    Its run gets a higher number, so deliveries that are under way are stale. `now`: its due time does not count any
    more. Returns None if there is no such job.
    """
    return first(executor.run(_MOVE, id=job_id, now=now, check_interval_s=check_interval_s, **_of_stage(stage)))


_PUT_OFF = Statement(f"""
WITH gone AS (DELETE FROM {{timers}} WHERE job_id = %(id)s AND ask IN ('run', 'timeout') AND accepted)/*!,{_WITHDRAWN}*/
DELETE FROM {{messages}} WHERE job_id = %(id)s AND locked_by IS NULL AND %(later)s""")


def forget_times(executor: Transaction, job_id: int, *, later: bool) -> None:
    """Remove the timers of a locked job, because it gets another time; with `later` the message that waits too."""
    executor.run(_PUT_OFF, id=job_id, later=later)


def _of_stage(stage: Stage) -> dict[str, Any]:
    return {
        **{name: getattr(stage, name) for name in ("task", "queue", "priority", "args", "kwargs")},
        **{name: stage.columns.get(name) for name in _OF_TASK},
        "enters": stage.pool is not None,
        **{name: (stage.pool or {}).get(name) for name in _OF_POOL},
    }


_ADD_ALIASES = Statement("""
INSERT INTO {aliases} (name, job_id)
SELECT r.name, r.job_id FROM json_to_recordset(%(rows)s::json) AS r(name text, job_id bigint) ORDER BY r.name
ON CONFLICT (name) DO UPDATE SET job_id = {aliases}.job_id RETURNING name, job_id""")


def add_aliases(executor: Transaction, names: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Add aliases and return each name's job: a name that was already taken keeps its job."""
    rows = [{"name": name, "job_id": job_id} for name, job_id in names]
    return {row.name: row.job_id for row in executor.run(_ADD_ALIASES, rows=json.dumps(rows))}


_REMOVE_ALIAS = Statement("DELETE FROM {aliases} WHERE name = %(name)s AND job_id = %(job_id)s RETURNING name")


def remove_alias(executor: Transaction, name: str, job_id: int) -> bool:
    """Remove an alias of the job; False if the job does not have it."""
    return bool(executor.run(_REMOVE_ALIAS, name=name, job_id=job_id))


_ALIASES_OF = Statement("SELECT name FROM {aliases} WHERE job_id = %(job_id)s ORDER BY name")


def aliases_of(executor: Reader, job_id: int) -> list[str]:
    """Read a job's aliases."""
    return [row.name for row in executor.run(_ALIASES_OF, job_id=job_id)]


_ADD_TAGS = Statement("""
INSERT INTO {tags} (tag, job_id)
SELECT r.tag, r.job_id FROM json_to_recordset(%(rows)s::json) AS r(job_id bigint, tag text, place int)
ORDER BY r.job_id, r.place
ON CONFLICT DO NOTHING""")


def add_tags(executor: Transaction, tagged: Iterable[tuple[int, Sequence[str]]]) -> None:
    """Give jobs further tags: (job id, tags). A tag that a job already has keeps its position."""
    rows = [
        {"job_id": job_id, "tag": tag, "place": place} for job_id, names in tagged for place, tag in enumerate(names)
    ]
    executor.run(_ADD_TAGS, rows=json.dumps(rows))


_REMOVE_TAGS = Statement("DELETE FROM {tags} WHERE job_id = %(job_id)s AND tag = ANY(%(tags)s::text[])")


def remove_tags(executor: Transaction, job_id: int, names: Iterable[str]) -> None:
    """Remove tags from a job; tags that it does not have are ignored."""
    executor.run(_REMOVE_TAGS, job_id=job_id, tags=list(names))


_TAGS_OF = Statement("SELECT tag FROM {tags} WHERE job_id = %(job_id)s ORDER BY place")


def tags_of(executor: Reader, job_id: int) -> list[str]:
    """Read a job's tags, in the order in which it got them."""
    return [row.tag for row in executor.run(_TAGS_OF, job_id=job_id)]


MOST_COUNTED = 1_000_000
"""The most rows that are counted, those of the newest jobs."""

_TAG_COUNTS = Statement("""
SELECT tag, count(*) AS jobs FROM (SELECT tag FROM {tags} ORDER BY job_id DESC LIMIT %(most)s) newest
GROUP BY tag ORDER BY jobs DESC, tag LIMIT %(limit)s""")


def tag_counts(executor: Reader, limit: int) -> list[tuple[str, int]]:
    """Count how many jobs have each tag, and return the `limit` most common tags; reads up to `MOST_COUNTED` rows."""
    return [(row.tag, row.jobs) for row in executor.run(_TAG_COUNTS, most=MOST_COUNTED, limit=limit)]


MOST_TRACKED = 10_000
"""The most tracked jobs that are followed at once; the last ones count."""

_TRACK = Statement("INSERT INTO {tracked} (job_id) VALUES (%(job_id)s) ON CONFLICT DO NOTHING")
_UNTRACK = Statement("DELETE FROM {tracked} WHERE job_id = %(job_id)s")


def track(executor: Transaction, job_id: int, *, on: bool) -> None:
    """Begin or cease to track a job; repeating it has no effect."""
    executor.run(_TRACK if on else _UNTRACK, job_id=job_id)


_IS_TRACKED = Statement("SELECT job_id FROM {tracked} WHERE job_id = %(job_id)s")


def is_tracked(executor: Reader, job_id: int) -> bool:
    """Tell whether a job is tracked."""
    return bool(executor.run(_IS_TRACKED, job_id=job_id))


_TRACKED = Statement(f"""
SELECT {HANDLE} FROM (SELECT job_id, place FROM {{tracked}} ORDER BY place DESC LIMIT %(limit)s) t
CROSS JOIN LATERAL (SELECT * FROM {{jobs}} x WHERE x.id = t.job_id OFFSET 0) j ORDER BY t.place""")


def tracked(executor: Reader, limit: int) -> Sequence[Any]:
    """Read the jobs that were tracked last, in the order in which they were tracked."""
    return executor.run(_TRACKED, limit=limit)


_TRACKED_IDS = Statement("SELECT job_id FROM {tracked} ORDER BY place DESC LIMIT %(limit)s")


def tracked_ids(executor: Reader) -> frozenset[int]:
    """Read the ids of the tracked jobs."""
    return frozenset(row.job_id for row in executor.run(_TRACKED_IDS, limit=MOST_TRACKED))


_SET_STATE = Statement("""
INSERT INTO {state} (job_id, key, value)
SELECT r.job_id, r.key, r.value::json
FROM json_to_recordset(%(rows)s::json) AS r(job_id bigint, key text, value text) ORDER BY r.job_id, r.key
ON CONFLICT (job_id, key) DO UPDATE SET value = excluded.value""")


def put_state(executor: Transaction, values: Mapping[tuple[int, str], str]) -> None:
    """Set keys of jobs, {(job id, key): JSON text}."""
    rows = [{"job_id": job_id, "key": key, "value": value} for (job_id, key), value in values.items()]
    executor.run(_SET_STATE, rows=json.dumps(rows))


_UNSET_STATE = Statement("DELETE FROM {state} WHERE job_id = %(job_id)s AND key = ANY(%(keys)s::text[])")


def remove_state(executor: Transaction, job_id: int, keys: Iterable[str]) -> None:
    """Remove keys; missing keys are ignored."""
    executor.run(_UNSET_STATE, job_id=job_id, keys=list(keys))


_READ_STATE = Statement("SELECT key, value::text AS value FROM {state} WHERE job_id = %(job_id)s ORDER BY key")
_READ_KEY = Statement("""
SELECT key, value::text AS value FROM {state} WHERE job_id = %(job_id)s AND key = %(key)s""")


def read_state(executor: Reader, job_id: int, key: str | None = None) -> dict[str, str]:
    """Read a job's state, or one key of it, as {key: JSON text}."""
    found = executor.run(_READ_STATE, job_id=job_id) if key is None else executor.run(_READ_KEY, job_id=job_id, key=key)
    return {row.key: row.value for row in found}


_SET_PROGRESS = Statement("""
INSERT INTO {progress} AS p (job_id, run_no, done, total, note)
SELECT j.id, j.run_no, %(done)s::double precision, %(total)s::double precision, %(note)s::text FROM {jobs} j
WHERE j.id = %(job_id)s AND j.run_no = %(run_no)s AND j.worker_id = %(worker_id)s
ON CONFLICT (job_id) DO UPDATE SET run_no = excluded.run_no, told_at = now(), done = excluded.done,
  total = excluded.total, note = excluded.note""")


def set_progress(
    executor: Transaction,
    job_id: int,
    *,
    run_no: int,
    worker_id: int,
    done: float | None,
    total: float | None,
    note: str | None,
) -> None:
    """Store a run's progress, unless the run is no longer the job's current run."""
    executor.run(_SET_PROGRESS, job_id=job_id, run_no=run_no, worker_id=worker_id, done=done, total=total, note=note)


_PROGRESS = Statement("""
SELECT job_id, run_no, told_at, done, total, note FROM {progress} WHERE job_id = ANY(%(ids)s::bigint[])""")


def progress_of_jobs(executor: Reader, ids: Iterable[int]) -> dict[int, Any]:
    """Read the last reported progress of jobs, {job id: (job_id, run_no, told_at, done, total, note)}."""
    return {row.job_id: row for row in executor.run(_PROGRESS, ids=list(ids))}


def progress(executor: Reader, job_id: int) -> Any | None:
    """Read the same for one job; None without any."""
    return progress_of_jobs(executor, [job_id]).get(job_id)
