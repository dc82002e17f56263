"""Lets runs into managed queues whose gates are open, and into capacity pools with free slots; samples these."""

from __future__ import annotations

import time

from ...operations.gates import queues
from ...operations.gates.capacity import fill
from ...operations.gates.queues import rank
from ...store import capacity
from ...store import queues as rows
from ...store.queues import MOST_LET_IN
from ..duty import Count, Report
from .sweep import SweepDuty

TURN_S = 0.5
"""The most seconds of one turn; then the sweeper's other duties come first again."""


class Gates(SweepDuty):
    """Ranks messages that waited before their queue was managed; publishes messages at open gates, as limits allow.

    A gate opens after a pause, a death, a new token of a rate, or a higher limit.
    """

    counts = (Count("let_in", "Messages that waited at the gate of a managed queue and were published."),)

    def _do(self, report: Report) -> None:
        until = time.monotonic() + TURN_S
        rank(self._runtime, must_stop=lambda: self._must_stop(until))
        while self._runtime.broker.ready and (let := queues.let_in(self._runtime)):
            report["let_in"] += let
            if let < MOST_LET_IN or self._must_stop(until):
                return


class LimitKeys(SweepDuty):
    """Forgets keys that were not served for a day."""

    interval_s = 3600.0

    def _do(self, report: Report) -> None:
        rows.forget_keys(self._connections)


class CapacityPools(SweepDuty):
    """Fills pools with free slots: a freed slot is handed over at once, except to rows that are not due, or locked."""

    def _do(self, report: Report) -> None:
        report["pools_filled"] += fill(self._runtime)


class CapacitySamples(SweepDuty):
    """Samples every pool that has changed since its last sample; in a store without pools it only reads."""

    interval_s = 10.0

    def _do(self, report: Report) -> None:
        report["pools_sampled"] += capacity.sample(self._connections)
