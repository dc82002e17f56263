"""Rows of `schedules`: the declaration, the times still to come, and the last job or message.

The transaction that makes due work locks the row first and moves it on, so each time gets its work exactly once. Every
change raises `revision`: work that was prepared for an earlier revision finds no row to lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from ..model.schedule import Plan, Spec, Window
from .statement import Autocommit, Reader, Statement, Transaction, first

IS_OPEN = """(EXISTS (SELECT FROM {askings} a WHERE a.task_id = s.last_task_id AND a.closed_at IS NULL)
    OR EXISTS (SELECT FROM {messages} m WHERE m.task_id = s.last_task_id AND m.job_id IS NULL))"""
"""Whether the last job or message of a schedule is still open, as SQL."""

_COLUMNS = f"""s.name, s.task, s.args::text AS args, s.kwargs::text AS kwargs, s.options::text AS options, s.every_s,
  s.cron, s.timezone, s.start_at, s.end_at, s.catch_up, s.overlap, s.jitter_s, s.declared::text AS declared,
  s.anchor_at, s.plan::text AS plan, s.next_at, s.due_at, s.revision, s.count, s.last_at, s.last_job_id,
  s.last_task_id, s.paused_at, s.pause_reason, s.trouble, now() AS read_at, {IS_OPEN} AS is_open"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A schedule's row; `read_at` is the store's time, `is_open` is about its last job or message."""

    name: str
    spec: Spec
    plan: Plan
    declared: Mapping[str, Any] | None
    """Its last declaration in `sidejob_schedules` that was applied; None if it was made by a call."""
    anchor_at: datetime
    next_at: datetime | None
    due_at: datetime | None
    revision: int
    count: int
    last_at: datetime | None
    last_job_id: int | None
    last_task_id: str | None
    is_open: bool
    paused_at: datetime | None
    pause_reason: str | None
    trouble: str | None
    read_at: datetime


def _of_row(row: Any) -> Row:
    found = row._asdict()
    found["spec"] = Spec(**{field.name: found.pop(field.name) for field in fields(Spec)})
    found["plan"] = Plan(row.name, tuple(map(Window.of_json, json.loads(row.plan))), row.jitter_s)
    found["declared"] = None if row.declared is None else json.loads(row.declared)
    return Row(**found)


_READ = Statement(f"""
SELECT {_COLUMNS} FROM {{schedules}} s WHERE s.name = ANY(%(names)s::text[]) OR %(names)s::text[] IS NULL
ORDER BY s.name""")


def read(executor: Reader, names: Iterable[str] | None = None) -> dict[str, Row]:
    """Read schedules by their names: those with these `names`, or all."""
    given = None if names is None else list(names)
    return {row.name: _of_row(row) for row in executor.run(_READ, names=given)}


_DUE = Statement(f"""
SELECT {_COLUMNS} FROM {{schedules}} s
WHERE s.due_at <= now() AND s.name > %(after)s AND NOT (s.overlap = 'wait' AND {IS_OPEN})
ORDER BY s.name LIMIT %(limit)s""")


def due(executor: Reader, *, after: str, limit: int) -> Sequence[Row]:
    """Read schedules that are due, by name, after a name; without those that wait for their last job or message."""
    return [_of_row(row) for row in executor.run(_DUE, after=after, limit=limit)]


_LOCK = Statement(f"SELECT {_COLUMNS} FROM {{schedules}} s WHERE s.name = %(name)s FOR NO KEY UPDATE")
_AT = f"""
SELECT {_COLUMNS} FROM {{schedules}} s WHERE s.name = %(name)s AND s.revision = %(revision)s FOR NO KEY UPDATE"""
_LOCK_AT = Statement(_AT)
_LOCK_FREE_AT = Statement(f"{_AT} SKIP LOCKED")


def lock(executor: Transaction, name: str) -> Row | None:
    """Lock a schedule, and return it; None if there is none."""
    row = first(executor.run(_LOCK, name=name))
    return None if row is None else _of_row(row)


def lock_at(executor: Transaction, name: str, revision: int, *, wait: bool = False) -> Row | None:
    """Lock a schedule that has not changed since it was read; None if it has, and without `wait` if it is locked."""
    row = first(executor.run(_LOCK_AT if wait else _LOCK_FREE_AT, name=name, revision=revision))
    return None if row is None else _of_row(row)


_CLOCK = Statement("SELECT clock_timestamp() AS now")
_INSERT = Statement("""
INSERT INTO {schedules} (name, task, args, kwargs, options, every_s, cron, timezone, start_at, end_at, catch_up,
  overlap, jitter_s, declared, anchor_at, plan, next_at, due_at)
VALUES (%(name)s, %(task)s, %(args)s::json, %(kwargs)s::json, %(options)s::json, %(every_s)s, %(cron)s, %(timezone)s,
  %(start_at)s, %(end_at)s, %(catch_up)s, %(overlap)s, %(jitter_s)s, %(declared)s::json, %(anchor_at)s,
  %(plan)s::json, %(next_at)s, %(due_at)s)
ON CONFLICT (name) DO NOTHING RETURNING name""")
_CHANGE = Statement("""
UPDATE {schedules} SET task = %(task)s, args = %(args)s::json, kwargs = %(kwargs)s::json, options = %(options)s::json,
  every_s = %(every_s)s, cron = %(cron)s, timezone = %(timezone)s, start_at = %(start_at)s, end_at = %(end_at)s,
  catch_up = %(catch_up)s, overlap = %(overlap)s, jitter_s = %(jitter_s)s, declared = %(declared)s::json,
  anchor_at = %(anchor_at)s, plan = %(plan)s::json, next_at = %(next_at)s, due_at = %(due_at)s,
  revision = revision + 1, trouble = NULL
WHERE name = %(name)s""")


def clock(executor: Reader) -> datetime:
    """Return the store's time at this moment, which is later than any time that was set before."""
    found: datetime = executor.run(_CLOCK)[0].now
    return found


def insert(executor: Transaction, plan: Plan, spec: Spec, *, anchor_at: datetime, declared: Any) -> bool:
    """Make a schedule; False if its name is taken, perhaps by a transaction that is not visible here."""
    values = _values(plan, spec, paused=False, anchor_at=anchor_at, declared=declared)
    return bool(executor.run(_INSERT, **values))


def change(executor: Transaction, plan: Plan, spec: Spec, *, paused: bool, anchor_at: datetime, declared: Any) -> None:
    """Change a locked schedule."""
    executor.run(_CHANGE, **_values(plan, spec, paused=paused, anchor_at=anchor_at, declared=declared))


def _values(plan: Plan, spec: Spec, *, paused: bool, anchor_at: datetime, declared: Any) -> dict[str, Any]:
    told = None if declared is None else json.dumps(declared)
    return {**asdict(spec), "declared": told, "anchor_at": anchor_at, **_to_come(plan, paused=paused)}


def _to_come(plan: Plan, *, paused: bool) -> dict[str, Any]:
    next_at = plan.next
    return {
        "name": plan.name,
        "plan": json.dumps(plan.as_json()),
        "next_at": next_at,
        "due_at": None if next_at is None or paused else plan.made_at(next_at),
    }


_GO_ON = Statement("""
UPDATE {schedules} SET plan = %(plan)s::json, next_at = %(next_at)s, due_at = %(due_at)s, revision = revision + 1,
  count = count + %(made)s, last_at = coalesce(%(last_at)s, last_at), trouble = NULL,
  last_job_id = CASE WHEN %(made)s > 0 THEN %(last_job_id)s::bigint ELSE last_job_id END,
  last_task_id = coalesce(%(last_task_id)s, last_task_id)
WHERE name = %(name)s""")


def go_on(
    executor: Transaction,
    plan: Plan,
    *,
    paused: bool,
    made: int = 0,
    last_at: datetime | None = None,
    last_job_id: int | None = None,
    last_task_id: str | None = None,
) -> None:
    """Note the last work of a locked schedule, and the times still to come."""
    executor.run(
        _GO_ON,
        **_to_come(plan, paused=paused),
        made=made,
        last_at=last_at,
        last_job_id=last_job_id,
        last_task_id=last_task_id,
    )


_PAUSE = Statement("""
UPDATE {schedules} SET paused_at = CASE WHEN %(paused)s THEN coalesce(paused_at, now()) END,
  pause_reason = %(reason)s, plan = %(plan)s::json, next_at = %(next_at)s, due_at = %(due_at)s, revision = revision + 1
WHERE name = %(name)s""")


def pause(executor: Transaction, plan: Plan, reason: str | None) -> None:
    """Pause a locked schedule."""
    executor.run(_PAUSE, paused=True, reason=reason, **_to_come(plan, paused=True))


def resume(executor: Transaction, plan: Plan) -> None:
    """End the pause of a locked schedule."""
    executor.run(_PAUSE, paused=False, reason=None, **_to_come(plan, paused=False))


_DELETE = Statement("DELETE FROM {schedules} WHERE name = %(name)s RETURNING name")
_DELETE_DECLARED = Statement("""
DELETE FROM {schedules} WHERE declared IS NOT NULL AND NOT name = ANY(%(names)s::text[]) RETURNING name""")


def delete(executor: Transaction, name: str) -> bool:
    """Delete a schedule, and tell whether it existed; waits for transactions that have locked it."""
    return bool(executor.run(_DELETE, name=name))


def delete_declared(executor: Transaction, *, but: Iterable[str]) -> list[str]:
    """Delete the declared schedules except those with these names; return the deleted names."""
    return sorted(row.name for row in executor.run(_DELETE_DECLARED, names=list(but)))


_TROUBLE = Statement("""
UPDATE {schedules} SET trouble = %(trouble)s
WHERE name = %(name)s AND revision = %(revision)s AND trouble IS DISTINCT FROM %(trouble)s""")


def note_trouble(connections: Autocommit, name: str, revision: int, trouble: str) -> None:
    """Note why the due work of a schedule cannot be made."""
    connections.run(_TROUBLE, name=name, revision=revision, trouble=trouble)


_TROUBLED = Statement(f"""
SELECT s.name, s.due_at, s.trouble FROM {{schedules}} s
WHERE s.due_at <= now() AND (s.trouble IS NOT NULL OR s.due_at < now() - make_interval(secs => %(for_s)s))
  AND NOT (s.overlap = 'wait' AND {IS_OPEN})
ORDER BY s.due_at, s.name""")


def troubled(executor: Reader, *, for_s: float) -> Sequence[Any]:
    """Read the schedules whose work cannot be made, or that have been due for so long: (name, due_at, trouble)."""
    return executor.run(_TROUBLED, for_s=for_s)


_RESTING = Statement(f"""
SELECT s.name, s.overlap, s.pause_reason, s.last_job_id, s.last_task_id,
  (SELECT j.status FROM {{jobs}} j WHERE j.id = s.last_job_id) AS status,
  extract(epoch FROM now() - s.paused_at)::double precision AS paused_s
FROM {{schedules}} s
WHERE s.paused_at < now() - make_interval(secs => %(for_s)s) OR s.paused_at IS NULL AND s.overlap IN ('skip', 'wait')
  AND s.last_at < now() - make_interval(secs => %(for_s)s) AND {IS_OPEN}
ORDER BY s.name""")


def resting(executor: Reader, *, for_s: float) -> Sequence[Any]:
    """Read the schedules that have been paused for so long, and those whose last work has been open for so long."""
    return executor.run(_RESTING, for_s=for_s)
