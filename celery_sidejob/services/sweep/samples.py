"""Samples for the charts of the last hour and day: of the totals of runs, and of capacity pools."""

from __future__ import annotations

from ...store import capacity, measured
from ..duty import Report
from .sweep import SweepDuty


class RunSamples(SweepDuty):
    """Notes once a minute how many runs there were since the schema was made; runs themselves pay nothing for it."""

    interval_s = measured.SAMPLED_EVERY_S

    def _do(self, report: Report) -> None:
        report["runs_sampled"] += measured.take_sample(self._connections)


class CapacitySamples(SweepDuty):
    """Samples every pool that has changed since its last sample; in a store without pools it only reads."""

    interval_s = 10.0

    def _do(self, report: Report) -> None:
        report["pools_sampled"] += capacity.sample(self._connections)
