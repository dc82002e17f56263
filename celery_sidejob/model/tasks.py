"""What is known of a Celery task: its name, where it is served, its ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

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


class Tasks(Protocol):
    """Knows the app's tasks."""

    def call(
        self,
        task: Any,
        args: Any,
        kwargs: Mapping[str, Any] | None,
        *,
        queue: str | None,
        priority: int | None,
        options: Mapping[str, Any],
    ) -> Call:
        """Resolve a task, a name or a signature, and check the arguments against the task's own parameters."""
        ...

    def ports(self, task: str) -> tuple[Mapping[str, PortOptions], Mapping[str, PortOptions]]:
        """Return the input and output ports that a task declares."""
        ...

    def served(self) -> list[dict[str, str]]:
        """Return what this process serves: {task, queue, options as JSON text}, for clients without the code."""
        ...

    def localize(self, eta: datetime) -> datetime:
        """Return `eta` with a time zone: the app's, where it has none."""
        ...

    def result(self, task_id: str) -> Any:
        """Return Celery's handle for the result of an asking."""
        ...
