"""Results and chords: brings results to the backend, sends late bodies, and removes what was kept for long enough."""

from __future__ import annotations

import time
from typing import Any

from ...model.logger import log_row_error
from ...operations.after_commit import settle
from ...operations.runs.endings import outcome_of
from ...store import asks, chords, results
from ..duty import Count, Report
from .sweep import PAGE, SLICE_S, SweepDuty

RESULT_GRACE_S = 5.0
"""Seconds within which the process that ends an asking should store its result itself."""


class UnsentResults(SweepDuty):
    """Stores a page of results; results stored in the backend's thread may come too late for the report."""

    interval_s = RESULT_GRACE_S / 2
    counts = (Count("results", "Results brought to the result backend."),)
    _since: Any = None

    def _do(self, report: Report) -> None:
        backend = self._sweep.backend
        if backend.is_busy:
            return
        rows = asks.unsent(self._connections, older_than_s=RESULT_GRACE_S, limit=PAGE, since=self._since)
        # The next page comes next time: a result that the backend never accepts must not delay the others.
        last = rows[-1].closed_at if len(rows) == PAGE else None
        self._since = last if last != self._since else None
        if rows:
            backend.do(lambda: self._settle(rows, report))

    def _settle(self, rows: Any, report: Report) -> None:
        outcomes = []
        for row in rows:
            try:
                outcomes.append(outcome_of(row, row.outcome, row.result))
            except ValueError:
                log_row_error(
                    row.task_id, "The end of %s cannot be read, and is not brought to the backend", row.task_id
                )
        report["results"] += settle(self._runtime, outcomes)


class LateBodies(SweepDuty):
    """Sends a page of late bodies, in the thread of the result backend."""

    interval_s = 2.0

    def _do(self, report: Report) -> None:
        self._sweep.backend.do(self._runtime.results.send_late_bodies)


class ExpiredResults(SweepDuty):
    """Removes expired results and chords, a page in each transaction; in a store without results it only reads."""

    interval_s = 60.0

    def _do(self, report: Report) -> None:
        until = time.monotonic() + SLICE_S
        while results.prune(self._connections) or chords.prune(self._connections):
            if self._must_stop(until):
                return
