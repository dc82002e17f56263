"""Checks and encodes the next stage of a job, like the task and arguments of a new job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from ..model import values
from ..model.capacity import Admission
from ..model.changes import Move, Stage
from ..model.checks import is_number, shown
from ..model.errors import InvalidValueError
from ..model.names import why_not_name
from ..operations.gates import capacity
from ..operations.runtime import Runtime
from .drafts import port_rows, when


def stage_of(  # noqa: PLR0913 - what a stage may change
    runtime: Runtime,
    row: Any,
    task: Any,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    *,
    queue: str | None,
    priority: int | None,
) -> Stage:
    """Check and encode the next stage of the job in `row`; a value of None keeps the present one.

    With another task and no queue, the job moves to that task's own queue.
    """
    if priority is not None and not is_number(priority, most=9):
        raise InvalidValueError(f"priority is a number from 0 to 9, higher is sooner; not {shown(priority)}.")
    if queue is not None and (problem := why_not_name(queue)) is not None:
        raise InvalidValueError(f"{shown(queue)} cannot be queue=: {problem}")
    if task is None and args is None and kwargs is None:
        return Stage(queue=queue, priority=priority, pool=_pool_of(runtime, row, row.task, queue or row.queue))
    limit = runtime.settings.max_value_bytes
    call = runtime.tasks.call(
        row.task if task is None else task,
        values.decode(row.args) if args is None else args,
        values.decode(row.kwargs) if kwargs is None else kwargs,
        queue=queue,
        priority=priority,
        options={},
    )
    is_other = task is not None
    there = call.queue if is_other else queue
    return Stage(
        task=call.task if is_other else None,
        queue=there,
        priority=priority,
        args=values.encode(list(call.args), limit=limit, what="args"),
        kwargs=values.encode(dict(call.kwargs), limit=limit, what="kwargs"),
        columns=call.columns if is_other else {},
        ports=port_rows((call.inports, call.outports), None, None) if is_other else (),
        pool=_pool_of(runtime, row, call.task, there or row.queue),
    )


def _pool_of(runtime: Runtime, row: Any, task: str, queue: str) -> Mapping[str, Any] | None:
    """Return the columns of the pool into which a stage takes a job; None if the job keeps its pool."""
    given, then = (runtime.tasks.admission(*of) for of in ((row.task, row.queue), (task, queue)))
    if Admission.stays(row.pool, given, then):
        return None
    capacity.prepare(runtime, [then])
    return {} if then is None else then.columns


def moved_to(stage: Stage) -> str | None:
    """Return the details of a move for the job's history, as JSON text: its new task and queue."""
    told = {name: value for name, value in (("task", stage.task), ("queue", stage.queue)) if value is not None}
    return json.dumps(told) if told else None


def move_of(
    runtime: Runtime, row: Any, stage: Stage, *, eta: datetime | None, countdown: float | timedelta | None
) -> Move:
    """Return the change that moves a job to a stage; a time in the past means now."""
    wait_s, due_at = when(runtime, eta=eta, countdown=countdown)
    return Move(row.id, stage, has_time=eta is not None or countdown is not None, due_at=due_at, wait_s=wait_s)
