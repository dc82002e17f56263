"""Gives room on ports that was kept for jobs which have not used it to others that wait."""

from __future__ import annotations

from ...operations.limits import pass_on
from ...store import room
from ..duty import Report
from .sweep import SweepDuty

PAGE = 100


class UnusedRoom(SweepDuty):
    """Passes on a page of it: those jobs are held up, or their process died before it passed the room on."""

    interval_s = 5.0

    def _do(self, report: Report) -> None:
        for job_id in room.kept_too_long(self._connections, limit=PAGE):
            with self._sweep.aside.by_itself("room", job_id) as may:
                if may:
                    pass_on(self._runtime, job_id)
                    report["room_passed_on"] += 1
