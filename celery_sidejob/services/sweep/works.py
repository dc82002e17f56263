"""Makes work that is due: the jobs of schedules, and the calls that follow batches."""

from __future__ import annotations

import time

from ...jobs.batch import settle
from ...jobs.schedule import make_due
from ...store import batches, schedules
from ..duty import Count, Report
from .sweep import PAGE, SLICE_S, SweepDuty


class Schedules(SweepDuty):
    """Serves the due schedules one after the other, until none is due or its slice of time is over; continues there.

    A schedule with a long backlog is served in the same order. If its process dies, another sweeper continues.
    """

    counts = (
        Count("scheduled", "Jobs and messages of durable tasks that schedules have made.", total="made_by_schedules"),
    )
    _after = ""

    def is_due(self) -> bool:
        """Tell whether there are schedules; they are in the primary."""
        return self._sweep.has_schedules and self._runtime.store.place == 0 and super().is_due()

    def _do(self, report: Report) -> None:
        until = time.monotonic() + SLICE_S
        made = True
        while made:
            made = False
            begins_at_first = not self._after
            while page := schedules.due(self._connections, after=self._after, limit=PAGE):
                for row in page:
                    self._after = row.name
                    with self._sweep.aside.by_itself("turn", row.name, kind="Schedule") as may:
                        count = make_due(self._runtime, row) if may else 0
                        report["scheduled"] += count
                        made |= count > 0
                    if self._must_stop(until):
                        return
            self._after = ""
            made |= not begins_at_first


TOGETHER = 20
"""The most batches that one turn checks; the next turn continues behind them."""


class Batches(SweepDuty):
    """Checks the batches that have not ended, one after the other. If its process dies, another sweeper continues."""

    counts = (Count("batches", "Batches that have ended."),)
    _after = 0

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
