"""Rescues runs whose worker is unknown: without this they would be held for ever."""

from __future__ import annotations

from ...store.outbox import holds
from ..duty import Report
from .dead_workers import RESCUED
from .sweep import Sweep, SweepDuty

PAGE = 200


class Strays(SweepDuty):
    """Rescues a page of such runs, once per lease."""

    counts = (RESCUED,)

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self.interval_s = self._runtime.settings.lease

    def _do(self, report: Report) -> None:
        for stray in holds.held_by_nobody(self._connections, PAGE):
            self._rescue(report, stray.job_id, run_no=stray.run_no, worker_id=stray.worker_id)
