"""Makes the jobs that schedules have due: a page in each transaction, one schedule after the other."""

from __future__ import annotations

import time

from ...jobs.scheduling import make_due
from ...store import schedules
from ..duty import Count, Report
from .sweep import PAGE, SLICE_S, Sweep, SweepDuty


class Schedules(SweepDuty):
    """Goes round the schedules that are due until nothing is, or its slice of time is over; it goes on there then.

    A schedule with a long backlog has its turn with the others. If its process dies, another sweeper goes on.
    """

    counts = (
        Count(
            "scheduled", "Jobs and messages of durable tasks that schedules have made.", total="made_by_schedules"
        ),
    )  # fmt: skip

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._after = ""

    def is_due(self) -> bool:
        """Tell whether there are schedules; they are in the primary."""
        return self._sweep.has_schedules and self._runtime.store.place == 0 and super().is_due()

    def _do(self, report: Report) -> None:
        until = time.monotonic() + SLICE_S
        made = True
        while made:
            made = False
            begins_at_first = not self._after
            while page := schedules.due(self._connections, after=self._after, limit=PAGE):
                for row in page:
                    self._after = row.name
                    with self._sweep.aside.by_itself("turn", row.name, kind="Schedule") as may:
                        count = make_due(self._runtime, row) if may else 0
                        report["scheduled"] += count
                        made |= count > 0
                    if self._must_stop(until):
                        return
            self._after = ""
            made |= not begins_at_first
