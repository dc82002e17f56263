"""The drafts of one call that makes many jobs: of a task and its options one is drawn up, and others are made after it.

What differs between them are the arguments and the task id. Where something looks at single calls, as a routing
function does, or where a job has what no other job may have, each is drawn up by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..model import values
from ..model.alike import alike
from ..model.changes import NewJob
from ..operations.runtime import Runtime
from ..store.statement import Transaction
from .creation import draft


@dataclass(frozen=True, slots=True)
class _Model:
    options: Mapping[str, Any]
    new: NewJob
    name: Callable[[Any, Any], str]
    """Checks the arguments of another job, and returns its task id."""


class Drafts:
    """Draws up the jobs of one call."""

    def __init__(self, runtime: Runtime, executor: Transaction | None) -> None:
        self._runtime = runtime
        self._executor = executor
        self._limit = runtime.settings.max_value_bytes
        self._models: dict[str, _Model] = {}

    def draft(self, item: Mapping[str, Any]) -> NewJob:
        """Draw up the job of an item, the arguments of `creation.draft`."""
        task, args, kwargs, options = _parts(item)
        model = self._models.get(task)
        are_arguments = isinstance(args, list | tuple | None) and isinstance(kwargs, dict | None)
        if model is not None and are_arguments and alike(options, model.options):
            return self._after(model, args or (), kwargs or {})
        new = draft(self._runtime, **item, executor=self._executor)
        name = self._runtime.tasks.naming(new.task)
        if name is not None and "task_id" not in options and not (new.unique or new.name or new.aliases):
            self._models[task] = _Model(options, new, name)
        return new

    def _after(self, model: _Model, args: Any, kwargs: Any) -> NewJob:
        return replace(
            model.new,
            task_id=model.name(args, kwargs),
            args=values.encode(list(args), limit=self._limit, what="args") if args else "[]",
            kwargs=values.encode(kwargs, limit=self._limit, what="kwargs") if kwargs else "{}",
        )


def _parts(item: Mapping[str, Any]) -> tuple[str, Any, Any, Mapping[str, Any]]:
    """Return the name of an item's task, "" if it has none, its arguments, and what else it says."""
    task = item["task"]
    if isinstance(task, Mapping) and len(item) == 1:  # a signature
        return task["task"], task["args"], task["kwargs"], task["options"]
    others = {key: value for key, value in item.items() if key not in ("task", "args", "kwargs")}
    name = task if isinstance(task, str) else getattr(task, "name", "")
    return name, item.get("args"), item.get("kwargs"), others
