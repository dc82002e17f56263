"""Publishes messages of jobs, and continuations, that are due: not published yet, or silent since.

It takes the oldest rows first and is fair between queues. A copy in the broker is harmless, because the claim drops it;
but copies of a whole backlog are a second backlog, so silent messages are looked for first (`backlog.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...model.crash_points import reach
from ...model.errors import InvalidValueError
from ...model.messages import CONTINUATION, Continuation, Doorbell
from ...model.protocols import Refused
from ...operations.after_commit import dispatch
from ...store.outbox import checks, publishing
from ...store.outbox.kinds import JOBS
from ..duty import Count, Report
from ..set_aside import SET_ASIDE_S
from .sweep import Sweep, SweepDuty

logger = logging.getLogger("celery_sidejob")

PAGE = 200
"""Messages of one queue checked in one step."""
PAGES = 20
"""Steps of one turn; then the other duties come first again."""

PUBLISHED = Count("published", "Messages given to the broker.")
MISSING = Count("missing", "Messages published again because nobody had claimed their run.", total="messages_missing")
UNPUBLISHED = Count("unpublished", "Messages the broker did not take; they are tried again.")


class Doorbells(SweepDuty):
    """Publishes some pages of due rows."""

    counts = (PUBLISHED, MISSING, UNPUBLISHED)

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._reserved: list[str] = []

    def is_due(self) -> bool:
        """Tell whether anything can be published."""
        return self._runtime.broker.ready

    def _do(self, report: Report) -> None:
        if self._reserved:  # a turn that failed left its reservation
            publishing.give_up(self._connections, self._reserved, wait_s=0.0)
        for _ in range(PAGES):
            if not self._sweep.may_go_on() or not self._publish_page(report):
                return

    def _publish_page(self, report: Report) -> bool:
        """Publish a page; False if there is none, or nothing can be published just now."""
        rows = self._due()
        if rows and self._sweep.backlog.pass_over_counted():
            rows = self._due()
        if not rows:
            return False
        fresh = [row.task_id for row in rows if row.published_at is None]
        silent = [row for row in rows if row.published_at is not None]
        missing = self._sweep.backlog.without_what_waits(silent, JOBS) if silent else []
        if missing is None:
            return False
        self._reserved = found = fresh + missing
        if not found:
            return True

        rows = self._connections.transact("reserve", partial(publishing.reserve, kind=JOBS, task_ids=found))
        report["missing"] += sum(row.missing for row in rows)
        rows = sorted(rows, key=lambda row: (-row.waited_s, row.job_id or 0))
        bells = [Doorbell.of_row(row) for row in rows if row.job_id is not None]
        refused: Refused = []
        continuations = _continuations(rows, refused)
        reach("sweep:before-publish")
        sent = dispatch(self._runtime, bells, continuations, refused=refused)
        report["published"] += sent
        self._reserved = []
        report["unpublished"] += len(rows) - sent
        if sent < len(rows) and not self._runtime.broker.ready:
            # The broker is unavailable: these rows need not wait for the end of their reservation.
            publishing.give_up(self._connections, [row.task_id for row in rows], wait_s=SET_ASIDE_S)
            return False
        # Otherwise these rows cannot be published: they wait for the end of their reservation, or are buried.
        self._sweep.unsendable.bury(refused, report)
        return True

    def _due(self) -> Sequence[Any]:
        return checks.candidates(self._connections, JOBS, per_queue=PAGE)


def _continuations(rows: Sequence[Any], refused: Refused) -> list[Continuation]:
    """Read continuations. Refuse unreadable ones; leave those of a newer format to a newer sweeper."""
    found, newer = [], 0
    for row in rows:
        if not row.publication:
            continue
        try:
            read = Continuation.of_row(row.task_id, row.queue, row.publication)
        except InvalidValueError as error:
            unread = Continuation(row.task_id.removeprefix(CONTINUATION), row.queue, row.publication)
            refused.append((unread, error))
            continue
        if read is None:
            newer += 1
        else:
            found.append(read)
    if newer:
        logger.warning("%d continuations are of a newer format than this version reads", newer)
    return found
