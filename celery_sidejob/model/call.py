"""The facts about a Celery task that a new job needs: its name, its queue, its ports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .capacity import Admission
from .port import PortOptions
from .unique import Unique


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A task with everything that a new job of it needs."""

    task: str
    queue: str
    priority: int | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    columns: Mapping[str, Any]
    """The values of further columns, by name, that the task's own options give to its jobs."""
    inports: Mapping[str, PortOptions]
    outports: Mapping[str, PortOptions]
    task_id: str
    eta: datetime | None
    countdown: float | None
    unique: Unique | None = None
    admission: Admission | None = None
    options: Mapping[str, Any]
    """The Celery options of its first asking (link, chain, headers, …), as JSON values."""
