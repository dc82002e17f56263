"""Publishes due rows that were not published or have been silent since; buries doomed and unsendable rows."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from ...model.crash_points import reach
from ...model.durable import Address, Death, Message
from ...model.errors import InvalidValueError, StoreUnavailableError
from ...model.logger import log_row_error, logger
from ...model.loss import Loss
from ...model.messages import CONTINUATION, Continuation, Doorbell
from ...model.names import storable
from ...model.protocols import Refused
from ...operations import deduplication
from ...operations.after_commit import dispatch, publish_and_mark
from ...operations.ledger import burials
from ...operations.runtime import Runtime
from ...store import workers
from ...store.outbox import publishing
from ...store.outbox.kinds import JOBS, TASKS, Kind
from ...store.parked import PATIENCE
from ..duty import SET_ASIDE_S, Count, Report
from ..heartbeat.heartbeat import Heartbeat
from ..heartbeat.run_ends import Stop, end_from_outside
from .sweep import SweepDuty

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


def bury_doomed(runtime: Runtime, rows: Sequence[Any], report: Report) -> None:
    """Bury doomed rows of one store, each separately: a row that cannot be buried does not stop the others."""
    for row, address in zip(rows, deduplication.addresses_of(runtime, rows), strict=True):
        try:
            report["tasks_buried"] += _bury_one(runtime, row, address)
        except Exception:
            log_row_error(row.task_id, "Task %s is doomed, and could not be buried; it is tried again", row.task_id)


def _bury_one(runtime: Runtime, row: Any, address: Address) -> bool:
    key = (row.task_id, row.generation)
    if row.fate == "revoked" and not deduplication.revoke(runtime, key, address):
        return False  # the copy that counts may be in a silent store, where it is not revoked
    if deduplication.gives_way(runtime, key, address):
        return False
    if row.fate == "expired" and deduplication.may_be_silent(runtime, address):
        return False  # a copy may have run to its end in a silent store: there is time to ask it
    message, reason = Message.of_row(row), "failed" if row.fate == "unknown" else row.fate
    verdict, buried = _tell_and_bury(runtime, message, Death(reason, _error_of(row)), address)
    if buried and row.fate == "revoked":
        runtime.results.announce_revoked(message)
    if verdict == "remove":
        burials.forget(runtime, key)
    return buried


def _tell_and_bury(runtime: Runtime, message: Message, death: Death, address: Address) -> tuple[str, bool]:
    """Report a message to the backend, then bury it if its verdict allows it: (the verdict, whether it is buried).

    After a death in between it is reported again.
    """
    results, key = runtime.results, (message.task_id, message.generation)
    verdict, riders = results.tell_of_doom(message, death.reason, death.error, place=runtime.store.place)
    reach("doom:told")
    return verdict, verdict == "bury" and burials.fail(
        runtime, key, death, by="sweeper", worker_id=None, address=address, riders=riders
    )


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


PER_QUEUE = 250
PAGE = 1000
"""The most rows, without their bodies, that one step checks, of one queue and in all."""
TURN_S, PAGES = 0.5, 20
"""The most seconds of one turn of a worker, and the most steps of any turn; then the sweeper's other duties come first.
"""
BODIES = 200
"""The most messages in memory at a time."""


class Due(SweepDuty):
    """Judges some pages of due rows of one kind; burials in a thread may come too late for the report."""

    counts: Sequence[Count] = (
        Count("published", "Messages given to the broker."),
        Count("missing", "Messages published again because nobody had claimed their run.", total="messages_missing"),
        Count("unpublished", "Messages the broker did not take; they are tried again."),
    )
    kind: Kind
    _reserved: Sequence[str] = ()

    def is_due(self) -> bool:
        """Tell whether it is time, and some messages can be published."""
        return self._runtime.broker.ready and super().is_due()

    def _do(self, report: Report) -> None:
        if self._reserved:  # a failed turn has left its reservation behind
            publishing.give_up(self._connections, self._reserved, wait_s=0.0)
        until = time.monotonic() + TURN_S
        for _ in range(PAGES):
            if not self._may_publish() or not self._check_a_page(report) or self._must_stop(until):
                return

    def _check_a_page(self, report: Report) -> bool:
        """Judge a page of due rows; False if no further row can be checked now."""
        found = self._candidates()
        silent = [row for row in found if row.published_at is not None]
        missing = self._sweep.backlog.missing(silent) if silent else []
        if not found or missing is None:
            return False
        gone = frozenset(missing)
        due = [row.task_id for row in found if row.published_at is None or row.task_id in gone]
        return all(self.judge(due[first : first + BODIES], report) for first in range(0, len(due), BODIES))

    def judge(self, task_ids: Sequence[str], report: Report) -> bool:
        """Strike, publish or bury the rows, in this order; False if nothing can be published just now."""
        self._reserved = task_ids
        strike_s = self._runtime.settings.lost_after
        reserve = partial(publishing.reserve, kind=self.kind, task_ids=task_ids, strike_s=strike_s)
        number_of = {task_id: number for number, task_id in enumerate(task_ids)}
        rows = self._connections.transact("reserve", reserve, single=True)
        rows = sorted(rows, key=lambda row: number_of[row.task_id])
        doomed = [row for row in rows if row.fate in DOOMS]
        if doomed and not self._sweep.backend.do(lambda: bury_doomed(self._runtime, doomed, report)):
            self._give_up(doomed)
        return self._publish([row for row in rows if row.fate == "publish"], report)

    def _publish(self, rows: Sequence[Any], report: Report) -> bool:
        report["missing"] += sum(row.missing for row in rows)
        refused: Refused = []
        sent = self._send(rows, refused)
        self._reserved = ()
        report["published"] += sent
        report["unpublished"] += len(rows) - sent
        if refused:  # if the backend is busy, the rows come again and are refused again
            self._sweep.backend.do(lambda: bury_unsendable(self._runtime, self._sweep.worker, refused, report))
        if self._runtime.broker.ready:
            return True  # unpublished rows wait for the end of their reservation
        self._give_up(rows)
        return False

    @abstractmethod
    def _send(self, rows: Sequence[Any], refused: Refused) -> int:
        """Publish rows and mark those that the broker took; return how many."""

    def _candidates(self) -> Sequence[Any]:
        return publishing.candidates(self._connections, self.kind, per_queue=PER_QUEUE, limit=PAGE)

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
    """Publishes the messages of durable tasks, byte for byte; buries those that are doomed."""

    counts = (*Due.counts, BURIED)
    kind = TASKS

    def _send(self, rows: Sequence[Any], refused: Refused) -> int:
        messages = deduplication.of_rows(self._runtime, rows)
        reach("sweep:before-publish")
        return publish_and_mark(self._runtime, messages, refused=refused)


def _continuations(rows: Sequence[Any], refused: Refused) -> list[Continuation]:
    """Read continuations. Refuse unreadable ones; a newer sweeper reads those of a newer format."""
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


UNSENDABLE = "unsendable"


def bury_unsendable(runtime: Runtime, worker: Heartbeat | None, refused: Refused, report: Report) -> None:
    """Bury messages that no queue will ever take: the sweeper would try them for ever.

    Each is buried separately: a message that cannot be buried does not stop the others. Runs are claimed under the
    identity of the `worker`, or else under a temporary one. Counts the durable tasks among the messages.
    """
    for message, error in refused:
        try:
            buried = _bury_refused(runtime, worker, message, f"{type(error).__name__}: {error}")
            report["tasks_buried"] += buried and isinstance(message, Message)
        except StoreUnavailableError:
            raise
        except Exception:
            log_row_error(message.task_id, "The message of %s could not be buried; it is tried again", message.task_id)


def _bury_refused(
    runtime: Runtime, worker: Heartbeat | None, message: Message | Doorbell | Continuation, error: str
) -> bool:
    if isinstance(message, Doorbell):
        return _fail_job(runtime, worker, message, error)
    if isinstance(message, Continuation):
        return burials.bury_continuation(runtime, message, reason=UNSENDABLE, error=error)
    (address,) = deduplication.addresses_of(runtime, [message])
    if deduplication.gives_way(runtime, (message.task_id, message.generation), address):
        return False
    return _tell_and_bury(runtime, message, Death(UNSENDABLE, error), address)[1]


def _fail_job(runtime: Runtime, worker: Heartbeat | None, bell: Doorbell, error: str) -> bool:
    """Claim the run whose message cannot be sent, and end it as failed; a death in between leaves a lost run."""
    kind, _, text = storable(error).partition(": ")
    stop = Stop(kind, text, UNSENDABLE)
    with nullcontext(worker.worker_id) if worker is not None else workers.as_worker(runtime.connections) as worker_id:
        return end_from_outside(runtime, (bell.job_id, bell.for_run), bell.task, stop, worker_id=worker_id)
