"""Asks jobs to run whose timers are due, and frees those that wait for no other job any more."""

from __future__ import annotations

from ...operations.dependencies import look_at
from ...operations.noted_asks import apply_due_timers
from ...store import asks
from ..duty import Count, Report
from .sweep import SweepDuty

PAGE = 200


class Timers(SweepDuty):
    """Fires a page of timers."""

    counts = (Count("timers", "Jobs asked by timers that were due."),)

    def _do(self, report: Report) -> None:
        for row in asks.due(self._connections, PAGE):
            with self._sweep.aside.by_itself("timer", row.job_id) as may:
                if may and row.depends:
                    look_at(self._runtime, row.job_id)
                if may:
                    apply_due_timers(self._runtime, row.job_id)
                    report["timers"] += 1
