"""Work that is due: asks jobs to run, makes the jobs of schedules, and the calls that follow batches.

Jobs are asked if they have due timers, room on a port at last, or packets of undelivered publications. And what was
asked to end is finished: large trees that a caller has left unfinished, and parked jobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ...jobs.batch import settle
from ...jobs.schedule import make_due
from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...operations.changes.deletion import TerminatedTree
from ...operations.changes.dependencies import look_at
from ...operations.changes.follow_up import apply_due_timers, deliver_page, pass_on, terminate_page
from ...operations.runs.terminations import end_parked
from ...store import asks, batches, deletions, parked, publications, room, schedules
from ..duty import Count, Report
from .sweep import PAGE, SLICE_S, Sweep, SweepDuty


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


class TreeTerminations(SweepDuty):
    """Terminates pages of jobs until its slice of time is over."""

    counts = (Count("terminated_pages", "Pages of large trees that were terminated."),)
    interval_s = 2.0

    def _do(self, report: Report) -> None:
        until = time.monotonic() + SLICE_S
        while terminate_page(self._runtime):
            report["terminated_pages"] += 1
            if self._must_stop(until):
                return


LATER_S = 10.0
"""Seconds after which a tree is tried again if a transaction was in the way."""


class TreeDeletions(SweepDuty):
    """Deletes parts of trees until its slice of time is over."""

    counts = (Count("deleted_parts", "Parts of large trees that were deleted."),)
    interval_s = 2.0

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._begun: dict[int, TerminatedTree] = {}
        self._stuck: dict[int, float] = {}

    def _do(self, report: Report) -> None:
        now = time.monotonic()
        self._stuck = {root: until for root, until in self._stuck.items() if until > now}
        for root in self._roots():
            with self._sweep.aside.by_itself("deletion", root) as may:
                if may and not self._delete(root, report, now + SLICE_S):
                    return

    def _roots(self) -> Iterator[int]:
        """Yield the roots of the trees that are not stuck, reading a page at a time."""
        page, last = [0], 0
        while page:
            page = deletions.trees(self._connections, after=last, limit=PAGE)
            last = max(page, default=0)
            yield from (root for root in page if root not in self._stuck)

    def _delete(self, root: int, report: Report, until: float) -> bool:
        """Delete parts of a tree; False if the duty must stop before the tree's end."""
        tree = self._begun.pop(root, None)
        if tree is None:
            tree = TerminatedTree(self._runtime, root)
            if not tree.read():
                self._stuck[root] = time.monotonic() + LATER_S
                return True
        for _ in tree.parts():
            report["deleted_parts"] += 1
            if self._must_stop(until):
                self._begun = {root: tree}
                return False
        self._stuck[root] = time.monotonic() + LATER_S  # unless the tree is gone
        return True


class ParkedTerminations(SweepDuty):
    """Terminates a page of these jobs without their shutdown, each after `parked.SHUTDOWN_WAITS_S`."""

    interval_s = 10.0
    counts = (
        Count(
            "shutdowns_skipped", "Parked jobs that were terminated without their shutdown.", total="shutdowns_skipped"
        ),
    )

    def _do(self, report: Report) -> None:
        for job_id in parked.to_end(self._connections, limit=PAGE):
            with self._sweep.aside.by_itself("parked job", job_id) as may:
                if may and end_parked(self._runtime, job_id):
                    logger.warning(
                        "Job %d was terminated without its shutdown: no worker of its queue knows its task", job_id
                    )
                    report["shutdowns_skipped"] += 1
