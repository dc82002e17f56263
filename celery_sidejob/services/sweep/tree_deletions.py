"""Goes on with deletions of large trees that a caller, or its death, has left."""

from __future__ import annotations

import time

from ...operations.deletion import TerminatedTree
from ...store import tree_deletions
from ..duty import Report
from .sweep import Sweep, SweepDuty

SLICE_S = 0.25
"""Seconds after which a turn begins no further part."""
TREES = 100
"""Trees of one turn."""
LATER_S = 10.0
"""Seconds after which a tree is tried again in which something was in the way."""


class TreeDeletions(SweepDuty):
    """Deletes parts of trees until its slice of time is over; reports `deleted_parts`."""

    interval_s = 2.0

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._begun: dict[int, TerminatedTree] = {}
        self._stuck: dict[int, float] = {}

    def _do(self, report: Report) -> None:
        now = time.monotonic()
        self._stuck = {root: until for root, until in self._stuck.items() if until > now}
        for root in tree_deletions.roots(self._connections, limit=TREES):
            with self._sweep.aside.by_itself("deletion", root) as may:
                if may and root not in self._stuck and not self._delete(root, report, now + SLICE_S):
                    self.due_at = now  # the next turn goes on
                    return

    def _delete(self, root: int, report: Report, deadline: float) -> bool:
        """Delete parts of a tree; False if the time was over before its end."""
        tree = self._begun.pop(root, None)
        if tree is None:
            tree = TerminatedTree(self._runtime, root)
            if not tree.read():
                self._stuck[root] = time.monotonic() + LATER_S
                return True
        while tree.delete_part():
            report["deleted_parts"] += 1
            if (time.monotonic() >= deadline and self._sweep.worker is not None) or not self._sweep.may_go_on():
                self._begun = {root: tree}
                return False
        self._stuck[root] = time.monotonic() + LATER_S  # unless that was its end
        return True
