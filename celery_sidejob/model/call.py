"""What a new job needs to know of its Celery task: its name, where it is served, its ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .port import PortOptions


@dataclass(frozen=True, slots=True)
class Call:
    """A task with everything that a new job of it needs."""

    task: str
    queue: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    inports: Mapping[str, PortOptions] = field(default_factory=dict)
    outports: Mapping[str, PortOptions] = field(default_factory=dict)
    priority: int | None = None
    max_losses: int | None = None
    retention_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """The Celery options of its first asking (link, chain, headers, …), as JSON values."""
    task_id: str | None = None
    eta: datetime | None = None
    countdown: float | None = None
