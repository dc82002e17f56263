"""Goes on with recursive terminations of large trees that a caller, or its death, has left."""

from __future__ import annotations

import time

from ...operations.tree_terminations import terminate_page
from ..duty import Report
from .sweep import SweepDuty

SLICE_S = 0.25
"""Seconds after which a turn begins no further page."""


class TreeTerminations(SweepDuty):
    """Terminates pages of jobs until its slice of time is over; reports `terminated_pages`."""

    interval_s = 2.0

    def _do(self, report: Report) -> None:
        deadline = time.monotonic() + SLICE_S
        while terminate_page(self._runtime):
            report["terminated_pages"] += 1
            if time.monotonic() >= deadline and self._sweep.worker is not None:
                self.due_at = time.monotonic()  # the next turn goes on
                return
            if not self._sweep.may_go_on():
                return
