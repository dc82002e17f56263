"""Drafts of jobs: the first call of a task is drafted in full, and further calls copy that draft.

They differ only in the arguments and the task id. A job gets a full draft of its own if something depends on the single
call, such as a routing function, or if the job has a value that no other job may have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..model import values
from ..model.changes import NewJob
from ..operations.changes import batches
from ..operations.runtime import Runtime
from ..store.statement import Transaction
from ..unit.open_unit import active
from .creation import draft


@dataclass(frozen=True, slots=True)
class _Model:
    options: Mapping[str, Any]
    new: NewJob
    name: Callable[[Any, Any], str | None]
    """Checks the arguments of another job and returns its task id; None if the job needs a full draft."""


OF_SINGLE_CALLS = frozenset({"queue", "priority", "ignore_result", "serializer", "compression", "delivery_mode"})
"""With only these options a single call can still copy an earlier draft; any other option that is not None prevents it.
"""


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
        """Draft the job of an item, whose keys are the arguments of `creation.draft`."""
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
        return replace(
            new,
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
