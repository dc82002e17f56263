"""Publishes or buries ordinary durable tasks that are due: not published, silent, lost, revoked or expired.

A message that no run has begun and that does not wait in the broker (`backlog.py`) is published again, byte for byte. A
run that died follows its task's `on_lost`. A copy in the broker is harmless, because only one delivery of a generation
gets the row. Pages are bounded and fair by queue. Each row is judged by itself: a row that cannot be published or
buried stops no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...model.crash_points import reach
from ...model.durable import Address, Death, Message
from ...model.loss import Loss
from ...model.protocols import Refused
from ...model.row_errors import log_row_error
from ...operations import burials
from ...operations.failover import deduplication
from ...operations.publishing import publish_and_mark
from ...store.outbox import checks, publishing
from ...store.outbox.kinds import TASKS
from ...store.parked import PATIENCE
from ..duty import Count, Report
from .doorbells import MISSING, PUBLISHED, UNPUBLISHED
from .sweep import TaskDuty

logger = logging.getLogger("celery_sidejob")

PER_QUEUE = 250
PAGE = 1000
"""Rows checked in one step, of one queue and in all, without their bodies."""
TURN_S = 0.5
"""Seconds of one turn; then the sweeper's other duties come first again."""
BODIES = 200
"""Messages in memory at a time."""
CHECK_AGAIN_S = 5.0
"""Seconds for which a message is left alone that the broker or the backend did not take."""

LOST = (
    "WorkerLostError: {why}. The run was lost, and its task must not be repeated without a check. "
    '`dead retry` begins it again; tasks that may be repeated can set on_lost="requeue"'
)
LOST_ONCE = "WorkerLostError: {why}. The run was lost, the only one that max_losses allows."
LOST_TOO_OFTEN = "WorkerLostError: {why}. {losses} runs were lost; this is the last one."
EXPIRED = "TaskRevokedError: it expired before any run began"
REVOKED = "TaskRevokedError: the task was revoked"
POISONED = "PoisonedMessage: its workers died as often as the broker's delivery_limit allows"
UNKNOWN = (
    "NotRegistered: no worker of queue {queue} has known the task {task} for {patience}. `dead retry` begins it once a "
    "worker of that queue imports it"
)
DOOMS = frozenset({"lost", "expired", "revoked", "unknown"})


class DueTasks(TaskDuty):
    """Judges pages of due rows for a while; burials in the backend's thread may come too late for the report."""

    counts = (
        PUBLISHED, MISSING, UNPUBLISHED,
        Count("tasks_buried", "Ordinary durable tasks that were lost, revoked or expired, and go to the dead set."),
    )  # fmt: skip

    def _do(self, report: Report) -> None:
        until = time.monotonic() + TURN_S
        while self._may_publish() and self._check_a_page(report) and time.monotonic() < until:
            pass

    def _check_a_page(self, report: Report) -> bool:
        """Judge a page of due rows; False if no further row can be checked now."""
        found = checks.candidates(self._connections, TASKS, per_queue=PER_QUEUE, limit=PAGE)
        if found and self._sweep.backlog.pass_over_counted():
            found = checks.candidates(self._connections, TASKS, per_queue=PER_QUEUE, limit=PAGE)
        if not found:
            return False
        due = self._sweep.backlog.without_what_waits(found, TASKS)
        if due is None:
            return False
        return all(self.judge(due[first : first + BODIES], report) for first in range(0, len(due), BODIES))

    def judge(self, task_ids: Sequence[str], report: Report) -> bool:
        """Strike, publish or bury the rows, in this order; False if nothing can be published just now."""
        strike_s = self._runtime.settings.lost_after
        reserve = partial(publishing.reserve, kind=TASKS, task_ids=task_ids, strike_s=strike_s)
        number_of = {task_id: number for number, task_id in enumerate(task_ids)}
        rows = self._connections.transact("reserve", reserve, single=True)
        rows = sorted(rows, key=lambda row: number_of[row.task_id])
        doomed = [row for row in rows if row.fate in DOOMS]
        if doomed and not self._sweep.backend.do(lambda: self._bury(doomed, report)):
            publishing.give_up(self._connections, [row.task_id for row in doomed], wait_s=CHECK_AGAIN_S)
        return self._publish([row for row in rows if row.fate == "publish"], report)

    def _publish(self, rows: Sequence[Any], report: Report) -> bool:
        messages = deduplication.of_rows(self._runtime, rows)
        report["missing"] += sum(row.missing for row in rows)
        reach("sweep:before-publish")
        refused: Refused = []
        sent = publish_and_mark(self._runtime, messages, refused=refused)
        report["published"] += sent
        report["unpublished"] += len(messages) - sent
        if refused:  # if the backend is busy, the rows come again and are refused again
            self._sweep.backend.do(lambda: self._sweep.unsendable.bury(refused, report))
        if self._runtime.broker.ready:
            return True  # unpublished rows wait for the end of their reservation
        publishing.give_up(self._connections, [row.task_id for row in rows], wait_s=CHECK_AGAIN_S)
        return False

    def _bury(self, rows: Sequence[Any], report: Report) -> None:
        """Tell the backend about each row, then move it to the dead set: a death in between only tells it once more."""
        for row, address in zip(rows, deduplication.addresses_of(self._runtime, rows), strict=True):
            try:
                report["tasks_buried"] += self._bury_one(row, address)
            except Exception:
                log_row_error(
                    logger, row.task_id, "Task %s is doomed, and could not be buried; it is tried again", row.task_id
                )

    def _bury_one(self, row: Any, address: Address) -> bool:
        key = (row.task_id, row.generation)
        if row.fate == "revoked" and not deduplication.revoke(self._runtime, key, address):
            return False  # the copy that counts may be in a silent store, where it is not revoked
        if deduplication.gives_way(self._runtime, key, address):
            return False
        if row.fate == "expired" and address.unconfirmed and self._runtime.stores.any_left_alone:
            return False  # a copy may have run to its end in a silent store: there is time to ask it
        error = _error_of(row)
        message = Message.of_row(row)
        reason = "failed" if row.fate == "unknown" else row.fate
        verdict = self._runtime.results.tell_of_doom(message, reason, error, place=self._runtime.store.place)
        reach("doom:told")
        if verdict == "bury":
            buried = burials.fail(
                self._runtime, key, Death(reason, error), by="sweeper", worker_id=None, address=address
            )
            if buried and row.fate == "revoked":
                self._runtime.results.announce_revoked(message)
            return buried
        if verdict == "remove":
            burials.forget(self._runtime, key)
        return False


def _error_of(row: Any) -> str:
    match row.fate:
        case "expired":
            return EXPIRED
        case "revoked":
            return REVOKED
        case "unknown":
            return UNKNOWN.format(queue=row.queue, task=row.task, patience=PATIENCE)
    if row.on_lost is None:
        return POISONED
    text = LOST if row.on_lost == "dead" else LOST_TOO_OFTEN if row.losses > 1 else LOST_ONCE
    return text.format(losses=row.losses, why=(Loss() if row.last_loss is None else Loss.of_json(row.last_loss)).why)
