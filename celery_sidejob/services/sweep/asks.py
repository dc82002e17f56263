"""Asks jobs to run: jobs with due timers, with room on a port at last, or with packets of undelivered publications."""

from __future__ import annotations

from ...model.errors import StoreUnavailableError
from ...operations.changes.dependencies import look_at
from ...operations.changes.follow_up import apply_due_timers, deliver_page, pass_on
from ...store import asks, publications, room
from ..duty import Count, Report
from .sweep import PAGE, SweepDuty


class Timers(SweepDuty):
    """Fires a page of due timers, and frees the jobs among them that no longer wait for other jobs."""

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
    """Gives room that was kept for jobs and not used to other waiting jobs, a page at a time.

    Those jobs are delayed, or their process died before it passed the room on.
    """

    interval_s = 5.0

    def _do(self, report: Report) -> None:
        for job_id in room.kept_too_long(self._connections, limit=PAGE):
            with self._sweep.aside.by_itself("room", job_id) as may:
                if may:
                    pass_on(self._runtime, job_id)
                    report["room_passed_on"] += 1


CHANNELS = 100
"""The most channels of one turn; the next turn begins after them."""

PAGES = 20
"""The most pages of one turn, unless there are more channels: each gets one."""


class Publications(SweepDuty):
    """Delivers pages of publications, one channel after the other."""

    counts = (Count("publications", "Pages of published messages that their publishers had not delivered."),)
    interval_s = 1.0

    _after = ""

    def _do(self, report: Report) -> None:
        channels = publications.channels(self._connections, after=self._after, limit=CHANNELS)
        self._after = channels[-1] if len(channels) == CHANNELS else ""
        done = 0
        while channels and (done == 0 or done < PAGES):
            for channel in list(channels):
                if not self._sweep.may_go_on():
                    return
                if self._deliver(channel):
                    done += 1
                    report["publications"] += 1
                else:
                    channels.remove(channel)

    def _deliver(self, channel: str) -> bool:
        """Deliver a page, unless the channel is set aside; the duty for timers asks jobs that cannot be asked here."""
        with self._sweep.aside.by_itself("publication", channel, kind="Channel") as may:
            if not may:
                return False
            try:
                return deliver_page(self._runtime, channel)
            except StoreUnavailableError:
                raise
            except Exception:
                return deliver_page(self._runtime, channel, noting=True)
        return False
