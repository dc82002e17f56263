"""The drafts of jobs: of a task and its options one is drawn up, and those of further calls are made after it.

What differs between them are the arguments and the task id. Where something looks at single calls, as a routing
function does, or where a job has what no other job may have, each is drawn up by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..model import values
from ..model.changes import NewJob
from ..operations import batches
from ..operations.runtime import Runtime
from ..store.statement import Transaction
from ..unit.open_unit import active
from .creation import draft


@dataclass(frozen=True, slots=True)
class _Model:
    options: Mapping[str, Any]
    new: NewJob
    name: Callable[[Any, Any], str | None]
    """Checks the arguments of another job, and returns its task id; None if the job is to be drawn up by itself."""


OF_SINGLE_CALLS = frozenset({"queue", "priority", "ignore_result", "serializer", "compression", "delivery_mode"})
"""Options of single calls, other than None, after which the jobs of further ones are made."""


def draft_single(runtime: Runtime, item: Mapping[str, Any], executor: Transaction | None) -> NewJob:
    """Draw up the job of a single call; after another one, if it has no options and is not part of anything."""
    given = {key: value for key, value in item.items() if value is not None}
    is_plain = executor is None and given.keys() - {"task", "args", "kwargs"} <= OF_SINGLE_CALLS
    if not is_plain or active() is not None or batches.present() is not None:
        return draft(runtime, **item, executor=executor)
    return Drafts(runtime, None, models=runtime.tasks.models).draft(given)


class Drafts:
    """Draws up the jobs of one call, or those of single calls."""

    def __init__(
        self, runtime: Runtime, executor: Transaction | None, *, models: dict[str, Any] | None = None
    ) -> None:  # fmt: skip
        self._runtime = runtime
        self._executor = executor
        self._limit = runtime.settings.max_value_bytes
        self._models: dict[str, _Model] = {} if models is None else models

    def draft(self, item: Mapping[str, Any]) -> NewJob:
        """Draw up the job of an item, the arguments of `creation.draft`."""
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
    """Return the name of an item's task, None if that is not simply said, its arguments, and what else it says."""
    task, args, kwargs = item["task"], item.get("args"), item.get("kwargs")
    others: Any = {key: value for key, value in item.items() if key not in ("task", "args", "kwargs")}
    if isinstance(task, Mapping):  # a signature
        if args or kwargs or others:  # to which these are added
            return None, None, None, {}
        name, args, kwargs, others = (task.get(part) for part in ("task", "args", "kwargs", "options"))
    else:
        name = task if isinstance(task, str) else getattr(task, "name", None)
    return name if isinstance(name, str) else None, args, kwargs, others or {}
