"""Lets runs into managed queues whose gates are open: after a pause, a death, a token of a rate, a higher limit."""

from __future__ import annotations

import time

from ...operations import permits
from ...store import queues
from ...store.permits import MOST_LET_IN
from ..duty import Count, Report
from .sweep import SweepDuty

TURN_S = 0.5
"""Seconds of one turn; then the sweeper's other duties come first again."""


class Gates(SweepDuty):
    """Publishes what waits at open gates, as many as there are free slots and tokens."""

    counts = (Count("let_in", "Messages that waited at the gate of a managed queue and were published."),)

    def is_due(self) -> bool:
        """Tell whether anything can be published."""
        return self._runtime.broker.ready

    def _do(self, report: Report) -> None:
        until = time.monotonic() + TURN_S
        while let := permits.let_in(self._runtime):
            report["let_in"] += let
            if let < MOST_LET_IN or self._must_stop(until):
                return


class LimitKeys(SweepDuty):
    """Forgets the turns of keys that were not served for a day."""

    interval_s = 3600.0

    def _do(self, report: Report) -> None:
        queues.forget_keys(self._connections)
