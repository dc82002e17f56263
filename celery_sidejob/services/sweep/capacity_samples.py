"""Notes the totals of capacity pools, from which `stats` computes their last minute."""

from __future__ import annotations

from ...store import capacity
from ..duty import Report
from .sweep import SweepDuty


class CapacitySamples(SweepDuty):
    """Samples every pool that has moved since its last sample; a store without pools is read only."""

    interval_s = 10.0

    def _do(self, report: Report) -> None:
        report["pools_sampled"] += capacity.sample(self._connections)
