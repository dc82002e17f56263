"""Notes which members of batches have ended, and makes a batch's follow-up work once all have ended."""

from __future__ import annotations

from ...jobs.batch import settle
from ...store import batches
from ..duty import Count, Report
from .sweep import Sweep, SweepDuty

TOGETHER = 20
"""Batches that one turn looks at; the next goes on with those behind them."""


class Batches(SweepDuty):
    """Goes round the batches that have not ended. If its process dies, another sweeper goes on."""

    counts = (Count("batches", "Batches that have ended."),)

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._after = 0

    def is_due(self) -> bool:
        """Tell whether there are batches that have not ended; they are in the primary."""
        return self._sweep.has_batches and self._runtime.store.place == 0 and super().is_due()

    def _do(self, report: Report) -> None:
        for _ in range(TOGETHER):
            batch_id = batches.next_unended(self._connections, after=self._after)
            self._after = batch_id or 0
            if batch_id is None:
                return
            with self._sweep.aside.by_itself("turn", batch_id, kind="Batch") as may:
                report["batches"] += int(may and settle(self._runtime, batch_id))
