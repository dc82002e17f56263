"""Samples of the totals of runs, for the charts of the last hour and day."""

from __future__ import annotations

from ...store import measured
from ..duty import Report
from .sweep import SweepDuty


class RunSamples(SweepDuty):
    """Notes once a minute how many runs there were since the schema was made; runs themselves pay nothing for it."""

    interval_s = measured.SAMPLED_EVERY_S

    def _do(self, report: Report) -> None:
        report["runs_sampled"] += measured.take_sample(self._connections)
