"""Notices that the broker was emptied, and has the lost messages of jobs published again, the oldest first."""

from __future__ import annotations

from ...store.outbox.kinds import JOBS
from ..duty import Count, Report
from .sweep import Sweep, SweepDuty


class EmptiedBroker(SweepDuty):
    """Looks for our marker in the broker; without the marker, looks for all messages ever published there.

    A broker that no sweeper has seen yet also seems emptied, and may have all its messages.
    """

    interval_s = 3.0
    counts = (Count("broker_emptied", "The broker was found emptied, or new.", total="broker_emptied", kind=bool),)

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._emptied = False  # kept here, because the broker tells only once

    def is_due(self) -> bool:
        """Tell whether it is time to look for the marker, or the last look for all messages is unfinished."""
        return self._runtime.broker.ready and (self._emptied or super().is_due())

    def _do(self, report: Report) -> None:
        if not self._emptied:
            self._emptied = self._runtime.broker.was_emptied(self._runtime.stores.label_of(self._runtime.store))
        if self._emptied:
            report["broker_emptied"] += 1
            self._sweep.tasks_emptied = True
            self._emptied = not self._sweep.backlog.look_for_all(JOBS, 0)
