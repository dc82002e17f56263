"""Giving a job another task, other arguments or another queue: it stays the same job; its sent messages are stale."""

from __future__ import annotations

from typing import Any

from ..model.changes import Stage
from .outbox.arming import OPENS_AT, armed
from .outbox.references import withdrawn
from .statement import Statement, Transaction, first

_OF_TASK = ("max_losses", "retention_s", "retention_keep", "rate_interval_s", "rate_burst", "rate_terminates")
"""The columns that follow from a task's own options."""
_OF_POOL = {"pool": "text", "pool_weight": "smallint", "pool_runs": "boolean"}
"""The columns of a job that determine its capacity pool, with their types."""
_CHANGES = f"""task = coalesce(%(task)s, j.task), queue = coalesce(%(queue)s, j.queue),
    priority = coalesce(%(priority)s::smallint, j.priority),
    args = coalesce(%(args)s::json, j.args), kwargs = coalesce(%(kwargs)s::json, j.kwargs),
    started = j.started AND %(task)s IS NULL,
    rate_opens_at = CASE WHEN %(task)s IS NULL THEN j.rate_opens_at END,
    {", ".join(f"{name} = CASE WHEN %(task)s IS NULL THEN j.{name} ELSE %({name})s END" for name in _OF_TASK)},
    {", ".join(f"{n} = CASE WHEN %(enters)s THEN %({n})s::{of} ELSE j.{n} END" for n, of in _OF_POOL.items())}"""
"""The changes of a stage in its job `j`, as SQL. A job with another task begins with that task's startup."""

_CHANGE = Statement(
    f"UPDATE {{jobs}} j SET {_CHANGES} WHERE j.id = %(id)s RETURNING j.task, j.queue, j.priority, j.pool"
)


def change(executor: Transaction, job_id: int, stage: Stage) -> Any:
    """Give a locked job, whose run has just ended, its next stage; returns its (task, queue, priority, pool)."""
    return executor.run(_CHANGE, id=job_id, **_given(stage))[0]


_WITHDRAWN = withdrawn("{messages} m", "m.job_id = %(id)s")

_MOVE = Statement(
    f"""
WITH changed AS (
  UPDATE {{jobs}} j SET {_CHANGES}, losses = 0,
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
    return first(executor.run(_MOVE, id=job_id, now=now, check_interval_s=check_interval_s, **_given(stage)))


_PUT_OFF = Statement(f"""
WITH gone AS (DELETE FROM {{timers}} WHERE job_id = %(id)s AND ask IN ('run', 'timeout') AND accepted)/*!,{_WITHDRAWN}*/
DELETE FROM {{messages}} WHERE job_id = %(id)s AND locked_by IS NULL AND %(later)s""")


def forget_times(executor: Transaction, job_id: int, *, later: bool) -> None:
    """Remove the timers of a locked job, because it gets another time; with `later` the message that waits too."""
    executor.run(_PUT_OFF, id=job_id, later=later)


def _given(stage: Stage) -> dict[str, Any]:
    return {
        **{name: getattr(stage, name) for name in ("task", "queue", "priority", "args", "kwargs")},
        **{name: stage.columns.get(name) for name in _OF_TASK},
        "enters": stage.pool is not None,
        **{name: (stage.pool or {}).get(name) for name in _OF_POOL},
    }
