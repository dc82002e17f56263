"""Adds up which tags jobs got and lost, so that a list of the most common tags reads few rows."""

from __future__ import annotations

import time

from ...store import tags
from ..duty import Report
from .sweep import SweepDuty

TURN_S = 0.5
"""Seconds of one turn; then the sweeper's other duties come first again."""


class TagCounts(SweepDuty):
    """Adds the changes of tags to their counters, a page in each transaction."""

    interval_s = 5.0

    def _do(self, report: Report) -> None:
        until = time.monotonic() + TURN_S
        while added := self._connections.transact("tag-counts", tags.add_up):
            report["tags_counted"] += added
            if added < tags.PAGE or self._must_stop(until):
                return
