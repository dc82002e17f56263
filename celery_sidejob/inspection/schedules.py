"""Views of schedules, all read at once."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ..jobs.schedule import info_of
from ..operations import schedules
from ..operations.runtime import Runtime


class ScheduleViews:
    """Read-only views of schedules."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def all(self, next_times: int) -> list[dict[str, Any]]:
        """Return the `info` of each schedule, by name, with its `next_times`; one statement."""
        found = sorted(schedules.read(self._runtime).items())
        hide = self._runtime.settings.redacted
        return [{**info_of(row, hide), "next_times": list(islice(row.plan.upcoming(), next_times))} for _, row in found]
