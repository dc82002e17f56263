"""Publishes rows that are due, not published yet or silent since; rows that are doomed are buried.

It takes the oldest rows first and is fair between queues. A message that no run has begun and that does not wait in the
broker (`backlog.py`) is published again. A copy in the broker is harmless, because only one delivery begins the run;
but copies of a whole backlog are a second backlog. Each row is judged by itself: a row that cannot be published or
buried stops no other.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...model.crash_points import reach
from ...model.errors import InvalidValueError
from ...model.messages import CONTINUATION, Continuation, Doorbell
from ...model.protocols import Refused
from ...operations.after_commit import dispatch
from ...operations.failover import deduplication
from ...operations.publishing import publish_and_mark
from ...store.outbox import checks, publishing
from ...store.outbox.kinds import JOBS, TASKS, Kind
from ..duty import Count, Report
from ..set_aside import SET_ASIDE_S
from .doomed import BURIED, DOOMS, Doomed
from .sweep import Sweep, SweepDuty

logger = logging.getLogger("celery_sidejob")

PER_QUEUE = 250
PAGE = 1000
"""Rows checked in one step, of one queue and in all, without their bodies."""
TURN_S, PAGES = 0.5, 20
"""Seconds of one turn of a worker, and steps of any turn; then the sweeper's other duties come first again."""
BODIES = 200
"""Messages in memory at a time."""


class Due(SweepDuty):
    """Judges some pages of due rows of one kind; burials in a thread may come too late for the report."""

    counts: Sequence[Count] = (
        Count("published", "Messages given to the broker."),
        Count("missing", "Messages published again because nobody had claimed their run.", total="messages_missing"),
        Count("unpublished", "Messages the broker did not take; they are tried again."),
    )
    kind: Kind

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._doomed = Doomed(sweep.runtime)
        self._reserved: list[str] = []

    def is_due(self) -> bool:
        """Tell whether it is time, and anything can be published."""
        return self._runtime.broker.ready and super().is_due()

    def _do(self, report: Report) -> None:
        if self._reserved:  # a turn that failed left its reservation
            publishing.give_up(self._connections, self._reserved, wait_s=0.0)
        until = time.monotonic() + TURN_S
        for _ in range(PAGES):
            if not self._may_publish() or not self._check_a_page(report) or self._must_stop(until):
                return

    def _check_a_page(self, report: Report) -> bool:
        """Judge a page of due rows; False if no further row can be checked now."""
        found = self._candidates()
        if found and self._sweep.backlog.pass_over_counted():
            found = self._candidates()
        silent = [row for row in found if row.published_at is not None]
        missing = self._sweep.backlog.without_what_waits(silent, self.kind) if silent else []
        if not found or missing is None:
            return False
        gone = frozenset(missing)
        due = [row.task_id for row in found if row.published_at is None or row.task_id in gone]
        return all(self.judge(due[first : first + BODIES], report) for first in range(0, len(due), BODIES))

    def judge(self, task_ids: Sequence[str], report: Report) -> bool:
        """Strike, publish or bury the rows, in this order; False if nothing can be published just now."""
        self._reserved = list(task_ids)
        strike_s = self._runtime.settings.lost_after
        reserve = partial(publishing.reserve, kind=self.kind, task_ids=task_ids, strike_s=strike_s)
        number_of = {task_id: number for number, task_id in enumerate(task_ids)}
        rows = self._connections.transact("reserve", reserve, single=True)
        rows = sorted(rows, key=lambda row: number_of[row.task_id])
        doomed = [row for row in rows if row.fate in DOOMS]
        if doomed and not self._sweep.backend.do(lambda: self._doomed.bury(doomed, report)):
            self._give_up(doomed)
        return self._publish([row for row in rows if row.fate == "publish"], report)

    def _publish(self, rows: Sequence[Any], report: Report) -> bool:
        report["missing"] += sum(row.missing for row in rows)
        refused: Refused = []
        sent = self._send(rows, refused)
        self._reserved = []
        report["published"] += sent
        report["unpublished"] += len(rows) - sent
        if refused:  # if the backend is busy, the rows come again and are refused again
            self._sweep.backend.do(lambda: self._sweep.unsendable.bury(refused, report))
        if self._runtime.broker.ready:
            return True  # unpublished rows wait for the end of their reservation
        self._give_up(rows)
        return False

    @abstractmethod
    def _send(self, rows: Sequence[Any], refused: Refused) -> int:
        """Publish rows and mark those that the broker has; return how many they are."""

    def _candidates(self) -> Sequence[Any]:
        return checks.candidates(self._connections, self.kind, per_queue=PER_QUEUE, limit=PAGE)

    def _give_up(self, rows: Sequence[Any]) -> None:
        publishing.give_up(self._connections, [row.task_id for row in rows], wait_s=SET_ASIDE_S)


class DueJobs(Due):
    """Publishes the messages of jobs, and the continuations of their askings."""

    is_urgent = True
    kind = JOBS

    def _send(self, rows: Sequence[Any], refused: Refused) -> int:
        bells = [Doorbell.of_row(row) for row in rows if row.job_id is not None]
        continuations = _continuations(rows, refused)
        reach("sweep:before-publish")
        return dispatch(self._runtime, bells, continuations, refused=refused)


class DueTasks(Due):
    """Publishes the messages of ordinary durable tasks, byte for byte; buries those that are doomed."""

    counts = (*Due.counts, BURIED)
    kind = TASKS

    def _send(self, rows: Sequence[Any], refused: Refused) -> int:
        messages = deduplication.of_rows(self._runtime, rows)
        reach("sweep:before-publish")
        return publish_and_mark(self._runtime, messages, refused=refused)


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
