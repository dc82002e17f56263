"""Admits jobs and tasks that wait for a slot, to capacity pools with free slots."""

from __future__ import annotations

from ...operations import capacity
from ..duty import Report
from .sweep import SweepDuty


class CapacityPools(SweepDuty):
    """Fills such pools: slots are handed over when they are freed, except to rows that are not due, or locked."""

    def _do(self, report: Report) -> None:
        report["pools_filled"] += capacity.fill(self._runtime)
