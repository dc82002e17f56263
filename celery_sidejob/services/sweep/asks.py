"""Asks jobs to run: those with due timers, and those for which there is room on a port."""

from __future__ import annotations

from ...operations.dependencies import look_at
from ...operations.limits import pass_on
from ...operations.noted_asks import apply_due_timers
from ...store import asks, room
from ..duty import Count, Report
from .sweep import PAGE, SweepDuty


class Timers(SweepDuty):
    """Fires a page of due timers, and frees the jobs among them that wait for no other job any more."""

    counts = (Count("timers", "Jobs asked by timers that were due."),)

    def _do(self, report: Report) -> None:
        for row in asks.due(self._connections, PAGE):
            with self._sweep.aside.by_itself("timer", row.job_id) as may:
                if may and row.depends:
                    look_at(self._runtime, row.job_id)
                if may:
                    apply_due_timers(self._runtime, row.job_id)
                    report["timers"] += 1


class UnusedRoom(SweepDuty):
    """Gives a page of room, kept for jobs that have not used it, to others that wait.

    Those jobs are held up, or their process died before it passed the room on.
    """

    interval_s = 5.0

    def _do(self, report: Report) -> None:
        for job_id in room.kept_too_long(self._connections, limit=PAGE):
            with self._sweep.aside.by_itself("room", job_id) as may:
                if may:
                    pass_on(self._runtime, job_id)
                    report["room_passed_on"] += 1
