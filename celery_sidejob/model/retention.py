"""How long finished jobs and dead entries are kept, and how many of them: settings and options of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from .checks import SECONDS, in_seconds, is_number, is_seconds

FORM = f"a timedelta or {SECONDS}, or a dict with such an 'older_than', a number 'keep' (not negative), or both"
"""The values that a retention may have, in words."""
FORM_BY_TASK = f"{FORM}; the dict may have 'tasks' as well, which gives names of tasks such values, or None"
"""The same form for a setting in which single tasks may have a retention of their own."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The bounds beyond which rows may be deleted: older than this, or not among the newest `keep`; None sets no bound.

    `tasks`: the retention of single tasks, which replaces this retention.
    """

    older_than: timedelta | None = None
    keep: int | None = None
    tasks: Mapping[str, Retention] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Retention:
        """Return the retention for a checked value."""
        given = value if isinstance(value, Mapping) else {"older_than": value}
        age_s = in_seconds(given.get("older_than"))
        tasks = {task: cls() if own is None else cls.of(own) for task, own in given.get("tasks", {}).items()}
        return cls(None if age_s is None else timedelta(seconds=age_s), given.get("keep"), tasks)

    @property
    def age_s(self) -> float | None:
        """The age in seconds."""
        return None if self.older_than is None else self.older_than.total_seconds()


def is_retention(value: Any) -> bool:
    """Tell whether a value has the form of a retention."""
    if not isinstance(value, Mapping):
        return is_seconds(in_seconds(value))
    if not value or not value.keys() <= {"older_than", "keep"}:
        return False
    older_than, keep = value.get("older_than"), value.get("keep")
    if older_than is None and keep is None:
        return False
    return (older_than is None or is_seconds(in_seconds(older_than))) and (keep is None or is_number(keep))


def is_retention_by_task(value: Any) -> bool:
    """Tell whether a value has the form of a retention in which single tasks may have their own."""
    if not isinstance(value, Mapping) or "tasks" not in value:
        return is_retention(value)
    tasks = value["tasks"]
    return is_retention({key: bound for key, bound in value.items() if key != "tasks"}) and (
        isinstance(tasks, Mapping)
        and all(isinstance(task, str) and task and (own is None or is_retention(own)) for task, own in tasks.items())
    )


def from_text(text: str) -> Any:
    """Return the value of a text from the environment: ``86400``, or ``older_than=86400,keep=1000``."""
    if "=" not in text:
        return float(text)
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        given[name.strip()] = int(number) if name.strip() == "keep" else float(number)
    return given
