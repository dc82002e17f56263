"""Moves durable tasks that are lost, expired, revoked or unknown to the dead set."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...model.crash_points import reach
from ...model.durable import Address, Death, Message
from ...model.loss import Loss
from ...model.row_errors import log_row_error
from ...operations import burials
from ...operations.failover import deduplication
from ...operations.runtime import Runtime
from ...store.parked import PATIENCE
from ..duty import Count, Report

logger = logging.getLogger("celery_sidejob")

BURIED = Count("tasks_buried", "Ordinary durable tasks that were lost, revoked or expired, and go to the dead set.")

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


class Doomed:
    """Buries doomed rows of one store, each by itself: one that cannot be buried does not stop the others."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def bury(self, rows: Sequence[Any], report: Report) -> None:
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
