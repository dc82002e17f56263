"""Drafts of jobs, and of the next stages of jobs: checks and encodes everything that a caller gives.

The first call of a task is drafted in full, and further calls copy that draft. They differ only in the arguments and
the task id. A job gets a full draft of its own if something depends on the single call, such as a routing function, or
if the job has a value that no other job may have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from ..model import values
from ..model.capacity import Admission
from ..model.changes import Move, NewJob, PortRow, Stage
from ..model.checks import MOST_S, in_seconds, is_near, is_number, shown
from ..model.columns import OPTIONS
from ..model.errors import InvalidValueError, JobNotFoundError
from ..model.names import (
    alias_taken,
    at_most,
    check_alias,
    check_child_name,
    check_key,
    check_tags,
    child_name_taken,
    why_not_name,
)
from ..model.port import NO_DATA, PortOptions, parse_ports
from ..model.protocols import Call
from ..operations.changes import batches
from ..operations.gates import capacity
from ..operations.runtime import Runtime
from ..store import jobs
from ..store.statement import Transaction
from ..unit.open_unit import active
from .lookup import edges_of, locate

Ports = Mapping[str, PortOptions]

OF_SINGLE_CALLS = frozenset({"queue", "priority", "ignore_result", "serializer", "compression", "delivery_mode"})
"""With only these options a single call can still copy an earlier draft; any other option that is not None prevents it.
"""


def draft(  # noqa: PLR0913 - the options of a new job
    runtime: Runtime,
    task: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    queue: str | None = None,
    parent: int | str | None = None,
    child_name: str | None = None,
    eta: datetime | None = None,
    countdown: float | None = None,
    inports: Any = None,
    outports: Any = None,
    aliases: Iterable[str] = (),
    state: Mapping[str, Any] | None = None,
    tags: Iterable[str] = (),
    priority: int | None = None,
    depends_on: Iterable[Any] = (),
    on_failure: str | None = None,
    executor: Transaction | None = None,
    **options: Any,
) -> NewJob:
    """Check and encode all parts of a new job, and return it without an id; nothing is written.

    `options` are Celery's, and the options that go straight into a column (`OPTIONS`). `executor` reads the parent,
    which may have been made in the caller's transaction.
    """
    given = {name: options.pop(name) for name in OPTIONS if name in options}
    options |= {name: value for name, value in (("eta", eta), ("countdown", countdown)) if value is not None}
    call = runtime.tasks.call(task, args, kwargs, queue=queue, priority=priority, options=options)
    unit = active()
    if unit is not None and given.get("created_by") is None:
        given["created_by"] = f"job:{unit.hold.job_id}"
    if not isinstance(state, Mapping | None):
        raise InvalidValueError(f"state= takes a mapping of keys to values, not a {type(state).__name__}.")
    limit = runtime.settings.max_value_bytes
    wait_s, due_at = when(runtime, eta=call.eta, countdown=call.countdown)
    edges = edges_of(runtime, depends_on, on_failure, executor)
    admission, columns = call.admission, dict(call.columns)
    if admission is not None:
        columns |= admission.columns
        if wait_s is not None or due_at is not None or edges:
            admission = replace(admission, mode="wait")
    return NewJob(
        task_id=call.task_id,
        task=call.task,
        queue=call.queue,
        priority=call.priority,
        args=values.encode(list(call.args), limit=limit, what="args"),
        kwargs=values.encode(dict(call.kwargs), limit=limit, what="kwargs"),
        parent_id=_parent_id(runtime, call, parent, child_name, executor),
        name=child_name,
        **columns,
        **{name: OPTIONS[name](name, value) for name, value in given.items()},
        options=json.dumps(dict(call.options)) if call.options else None,
        depends_on=edges,
        batch=batches.present(),
        unique=call.unique,
        admission=admission,
        due_at=due_at,
        wait_s=wait_s,
        ports=port_rows((call.inports, call.outports), inports, outports),
        aliases=_aliases(runtime, call, aliases),
        state=encode_state(state or {}, limit=limit),
        tags=check_tags(tags, where="tags="),
    )


def encode_state(state: Mapping[str, Any], *, limit: int) -> dict[str, str]:
    """Check the keys of a job's state, and return its values as texts."""
    return {
        check_key(key): values.encode(value, limit=limit, what=f"state[{key!r}]")
        for key, value in at_most(state.items(), "keys of the state")
    }


def check_child_name_is_free(runtime: Runtime, parent_id: int, name: str) -> None:
    """Refuse a taken name at the call, inside a run, rather than at the run's commit."""
    unit = active()
    assert unit is not None
    gained, gone = unit.seen.family(parent_id)
    other = gained.get(name)
    if other is None and parent_id not in unit.seen.new_jobs():
        other = jobs.child(runtime.connections, parent_id, name)
    if other is not None and (name in gained or other not in gone):
        raise child_name_taken((parent_id, name))


def port_rows(own: tuple[Ports, Ports], inports: Any, outports: Any) -> tuple[PortRow, ...]:
    """Return the ports of a job: its task's ports, each replaced by the creator's port of the same name, if any."""
    merged_in = {**own[0], **parse_ports(inports or (), where="inports")}
    merged_out = {**own[1], **parse_ports(outports or (), where="outports")}
    return (
        *(_port_row("in", name, options) for name, options in merged_in.items()),
        *(_port_row("out", name, options) for name, options in merged_out.items()),
    )


def when(
    runtime: Runtime, *, eta: datetime | None, countdown: float | timedelta | None
) -> tuple[float | None, datetime | None]:
    """Return (seconds to wait, moment) of an `eta` or `countdown`; both None for now. `eta` wins."""
    if eta is not None:
        if not isinstance(eta, datetime):
            raise InvalidValueError(f"eta= takes a datetime, not {type(eta).__name__}; seconds go into countdown=.")
        return None, runtime.tasks.localize(eta)
    if countdown is None:
        return None, None
    wait_s = in_seconds(countdown)
    if not is_near(wait_s):
        raise InvalidValueError(f"countdown= takes seconds, {MOST_S}, not {shown(wait_s)}.")
    return (float(wait_s), None) if wait_s > 0 else (None, None)


def _parent_id(
    runtime: Runtime, call: Call, parent: int | str | None, child_name: str | None, executor: Transaction | None
) -> int | None:
    """Return the id of the parent of a new job; in a run its name must be free there.

    The commit checks the name, and the aliases, if a unique key may resolve to the very job that has them.
    """
    if parent is None and child_name is None:
        return None
    above = None if parent is None else locate(runtime, parent, executor)
    if parent is not None and above is None:
        raise JobNotFoundError(f"There is no job {shown(parent)} to be the parent of a new {call.task!r}.")
    if above is None or child_name is None:
        raise InvalidValueError(
            "A child of a job needs parent= and child_name= together; got "
            f"parent={above and above[0]!r}, child_name={shown(child_name)}."
        )
    check_child_name(child_name)
    if active() is not None and call.unique is None:
        check_child_name_is_free(runtime, above[0], child_name)
    return above[0]


def _aliases(runtime: Runtime, call: Call, aliases: Iterable[str]) -> tuple[str, ...]:
    """Return the aliases of a new job, each once; in a run they must be free."""
    if isinstance(aliases, str):
        raise InvalidValueError(f"aliases= takes a list of names, not the string {aliases!r}.")
    names = tuple(dict.fromkeys(check_alias(name) for name in at_most(aliases, "aliases")))
    for name in names if active() is not None and call.unique is None else ():
        if (owner := locate(runtime, name)) is not None:
            raise alias_taken(name, owner[0])
    return names


def _port_row(direction: Any, name: str, options: PortOptions) -> PortRow:
    default = None if options.default is NO_DATA else values.encode(options.default, what=f"default of port {name!r}")
    return PortRow(direction, name, default, options.channels, options.limit)


# -- copies of a draft -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Model:
    options: Mapping[str, Any]
    new: NewJob
    name: Callable[[Any, Any], str | None]
    """Checks the arguments of another job and returns its task id; None if the job needs a full draft."""


def draft_single(runtime: Runtime, item: Mapping[str, Any], executor: Transaction | None) -> NewJob:
    """Draft the job of a single call; copy an earlier draft if it has no options and is not part of a workflow."""
    given = {key: value for key, value in item.items() if value is not None}
    is_plain = executor is None and given.keys() - {"task", "args", "kwargs"} <= OF_SINGLE_CALLS
    if not is_plain or active() is not None or batches.present() is not None:
        return draft(runtime, **item, executor=executor)
    return Drafts(runtime, None, models=runtime.tasks.models).draft(given)


class Drafts:
    """Drafts the jobs of one call, or the jobs of single calls."""

    def __init__(self, runtime: Runtime, executor: Transaction | None, *, models: dict[str, Any] | None = None) -> None:
        self._runtime = runtime
        self._executor = executor
        self._limit = runtime.settings.max_value_bytes
        self._models: dict[str, _Model] = {} if models is None else models

    def draft(self, item: Mapping[str, Any]) -> NewJob:
        """Draft the job of an item, whose keys are the arguments of `draft`."""
        task, args, kwargs, options = _parts(item)
        model = self._models.get(task) if task is not None else None
        are_arguments = isinstance(args, list | tuple | None) and isinstance(kwargs, dict | None)
        if model is not None and are_arguments and values.alike(options, model.options):
            task_id = model.name(args or (), kwargs or {})
            if task_id is not None:
                return self._after(model.new, task_id, args, kwargs)
        new = draft(self._runtime, **item, executor=self._executor)
        name = self._runtime.tasks.naming(new.task)
        is_own = "task_id" in options or new.unique or new.name or new.aliases
        if task is not None and name is not None and not is_own:
            self._models[task] = _Model(options, new, name)
        return new

    def _after(self, new: NewJob, task_id: str, args: Any, kwargs: Any) -> NewJob:
        return new.but(
            task_id=task_id,
            args=values.encode(list(args), limit=self._limit, what="args") if args else "[]",
            kwargs=values.encode(kwargs, limit=self._limit, what="kwargs") if kwargs else "{}",
        )


def _parts(item: Mapping[str, Any]) -> tuple[str | None, Any, Any, Mapping[str, Any]]:
    """Return the task's name (None if the item does not simply name it), its arguments, and the item's other keys."""
    task, args, kwargs = item["task"], item.get("args"), item.get("kwargs")
    others: Any = {key: value for key, value in item.items() if key not in ("task", "args", "kwargs")}
    if isinstance(task, Mapping):  # a signature
        if args or kwargs or others:  # which add to the signature's own
            return None, None, None, {}
        name, args, kwargs, others = (task.get(part) for part in ("task", "args", "kwargs", "options"))
    else:
        name = task if isinstance(task, str) else getattr(task, "name", None)
    return name if isinstance(name, str) else None, args, kwargs, others or {}


# -- the next stage of a job -------------------------------------------------------------------------------------------


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
