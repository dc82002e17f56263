"""Finishes what was asked to end: large trees that a caller has left unfinished, and parked jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ...model.logger import logger
from ...operations.changes.deletion import TerminatedTree
from ...operations.changes.follow_up import terminate_page
from ...operations.runs.terminations import end_parked
from ...store import deletions, parked
from ..duty import Count, Report
from .sweep import PAGE, SLICE_S, Sweep, SweepDuty


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
