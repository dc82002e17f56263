"""Finishes recursive terminations of large trees that a caller has left, or that its death has interrupted."""

from __future__ import annotations

import time

from ...operations.tree_terminations import terminate_page
from ..duty import Count, Report
from .sweep import SweepDuty

SLICE_S = 0.25
"""Seconds after which a turn begins no further page."""


class TreeTerminations(SweepDuty):
    """Terminates pages of jobs until its slice of time is over."""

    counts = (Count("terminated_pages", "Pages of large trees that were terminated."),)
    interval_s = 2.0

    def _do(self, report: Report) -> None:
        until = time.monotonic() + SLICE_S
        while terminate_page(self._runtime):
            report["terminated_pages"] += 1
            if self._must_stop(until):
                return
