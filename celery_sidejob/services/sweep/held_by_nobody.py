"""Rescues runs whose worker is dead and forgotten: no other duty would free them."""

from __future__ import annotations

from ...store.outbox import holds
from ..duty import Report
from .dead_workers import RESCUED
from .sweep import Sweep, SweepDuty

PAGE = 200


class HeldByNobody(SweepDuty):
    """Rescues a page of such runs, once per lease."""

    counts = (RESCUED,)

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self.interval_s = self._runtime.settings.lease

    def _do(self, report: Report) -> None:
        for held in holds.held_by_nobody(self._connections, PAGE):
            self._rescue(report, held.job_id, run_no=held.run_no, worker_id=held.worker_id)
