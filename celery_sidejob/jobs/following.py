"""Calls that are kept as JSON, checked when they are given and made later by the sweeper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import uuid4

from ..model import values
from ..model.checks import shown
from ..model.errors import InvalidValueError
from ..operations import capacity
from ..operations.runtime import Runtime
from ..operations.works import Works
from .creation import draft

OPTIONS = ("queue", "priority", "countdown")


@dataclass(frozen=True, slots=True)
class Following:
    """A call of a sidejob task or of a durable one; arguments and options are JSON text."""

    task: str
    args: str
    kwargs: str
    options: str

    def as_json(self) -> Mapping[str, str]:
        """Return it as JSON values."""
        return asdict(self)


def following_of(runtime: Runtime, where: str, call: Any) -> Following:
    """Check a call: a task, or a signature of one with its arguments, `queue`, `priority` and `countdown`."""
    task: Any = call
    args: Any = ()
    kwargs: Any = {}
    options: dict[str, Any] = {}
    if isinstance(call, Mapping):
        if not isinstance(call.get("task"), str) or call.get("subtask_type") is not None:
            raise InvalidValueError(f"{where}= takes a task or a signature of one task, not {shown(call)}.")
        task, args, kwargs, options = (
            call["task"],
            call.get("args"),
            call.get("kwargs"),
            dict(call.get("options") or {}),
        )
    name = getattr(task, "name", task)
    if not isinstance(name, str):
        raise InvalidValueError(f"{where}= takes a task or a signature of one task, not {shown(call)}.")
    unknown = [key for key, value in options.items() if key not in OPTIONS and value is not None]
    if unknown:
        raise InvalidValueError(f"{where}= takes a signature with {', '.join(OPTIONS)}, not with {', '.join(unknown)}.")
    limit = runtime.settings.max_value_bytes
    found = Following(
        name,
        values.encode(list(args or ()), limit=limit, what=f"args of {where}"),
        values.encode(dict(kwargs or {}), limit=limit, what=f"kwargs of {where}"),
        values.encode({key: value for key, value in options.items() if value is not None}, what=f"options of {where}"),
    )
    works_of(runtime, [found])  # refuses what a call would refuse; nothing is written
    return found


def works_of(runtime: Runtime, calls: Iterable[Following]) -> list[Works]:
    """Make calls ready to be written."""
    return [_works(runtime, call) for call in calls]


def _works(runtime: Runtime, call: Following) -> Works:
    args, kwargs, options = values.decode(call.args), values.decode(call.kwargs), values.decode(call.options)
    options = {**options, "task_id": str(uuid4())}
    if runtime.tasks.kind(call.task) == "job":
        new = draft(runtime, call.task, args, kwargs, **options)
        if new.admission is not None:
            new = replace(new, admission=replace(new.admission, mode="wait"))  # nobody is there to be refused
        capacity.prepare(runtime, [new.admission])
        return Works(jobs=[new])
    runtime.tasks.check_message(call.task, args, kwargs, options)
    messages, tell = runtime.tasks.messages(call.task, args, kwargs, [options])
    waiting = [
        one if one.admission is None else replace(one, admission=replace(one.admission, mode="wait"))
        for one in messages
    ]
    return Works(messages=waiting, tell=tell)
