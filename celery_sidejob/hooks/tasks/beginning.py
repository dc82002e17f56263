"""The beginning of a run of a durable task: its row is locked, or the delivery goes no further.

The class of an exception tells the worker's parent why a delivery runs nothing.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from celery.app.task import Context
from celery.exceptions import Ignore, SoftTimeLimitExceeded

from ...model.durable import (
    ADOPTED,
    DIGEST,
    HEADER,
    HELD,
    REPUBLISHED,
    WORKER,
    Address,
    Content,
    Digest,
    HeldRun,
    Key,
    Message,
    Terms,
    key_of,
)
from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...operations.gates.queues import AtGateError
from ...operations.ledger import durable_runs
from ...operations.ledger.durable_runs import Run, as_kept, is_forged
from ...operations.runs import measuring
from ...operations.runtime import Runtime
from ...store.outbox import tasks
from ..admission import waiting_in
from ..apps import runtime_for
from ..broker.connection import PAUSE_S
from ..messages.kept_message import unpacker
from ..worker import own_process, recording
from ..worker.received import OF_THE_PARENT
from . import chords
from .present import RUNS, run_of


class Copy(Ignore):
    """A copy of a message that runs, was finished, is in the dead set, or waits at the gate of its managed queue."""


class Forged(Ignore):
    """A message with the id of a waiting or running task and another content: the task itself goes on."""


class Left(Ignore):
    """Its store does not answer: the message is sent again; a message without a row goes back to the broker."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery of a durable task in its process."""

    task: Any
    request: Context
    runtime: Runtime
    key: Key | None
    """The key of its row; None if its publisher has made no row."""
    address: Address
    content: Content
    adopted: Message | None
    """The message from which to make a row, if there is none."""

    @classmethod
    def of(cls, task: Any, request: Context) -> Delivery:
        """Read the message; raises Ignore for a newer format."""
        header = request.get(HEADER)
        key = key_of(request.id, header)
        adopted = request.get(ADOPTED) if key is None else None
        if key is None and adopted is None:
            # Its row is in the store: the message is sent again when it has been silent for a while.
            logger.warning("Task %s is left to newer workers: its message is of a newer format", request.id)
            raise Ignore(f"task {request.id}: its message is of a newer format")
        runtime = runtime_for(task.app, f"{task.name} is durable")
        return cls(task, request, runtime, key, Address.of(header), content_of(request), adopted)

    @property
    def terms(self) -> Terms:
        """The process and the rules for losses, as `durable_runs` records them."""
        most = self.task.max_losses or self.runtime.settings.max_losses
        return Terms(os.getpid(), self.task.lost_policy, most)

    def run_in(self, there: Runtime, worker_id: int) -> Run:
        """Return its run, before its begin, for one store and this worker's identity there."""
        return Run(self.key or (self.request.id, 1), self.task.name, worker_id, there, self.content)


def begin(task: Any, request: Context) -> None:
    """Lock the row of a delivery; raises Copy, Forged or Left if it must not, or cannot, begin."""
    try:
        recording.begin(task.app)
        delivery = Delivery.of(task, request)
        held: HeldRun | None = request.get(HELD)
        if held is None or not _begin_held(delivery, held):
            _begin_locked(delivery, _stores_or_leave(delivery))
    except SoftTimeLimitExceeded:  # the limit is meant for the body
        if run_of(task) is not None:
            raise
        raise _left(request, "its time limit struck while it waited for its lock") from None


def _begin_held(delivery: Delivery, held: HeldRun) -> bool:
    """Begin a run whose row this worker holds; False if that is not sure, or if its queue is now managed."""
    if held.stands:
        run = delivery.run_in(delivery.runtime, held.held.worker_id)
        run.is_held, run.held_at, run.queue, run.waited_s = True, held.held.at, held.queue, held.waited_s
        _note_begun(delivery, run)
        return True
    try:
        durable_runs.unhold(delivery.runtime, [held.held._replace(place=None)])
    except StoreUnavailableError as error:
        _leave(delivery, str(error))
    return False


def _begin_locked(delivery: Delivery, stores: Sequence[tuple[Runtime, int]]) -> None:
    """Begin in the store that has the row, or raise the reason why the delivery must not run."""
    failure: StoreUnavailableError | None = None
    for there, worker_id in stores:
        run = delivery.run_in(there, worker_id)
        try:
            with delivery.runtime.stores.trying(there.store):
                has_row = _lock(delivery, run)
        except StoreUnavailableError as error:
            failure = error
            continue
        except AtGateError as error:
            raise Copy(str(error)) from None
        there.store.answered()
        if has_row:
            _note_begun(delivery, run)
            return
    if failure is not None:
        _leave(delivery, str(failure))
    is_anywhere = delivery.address.store is None and delivery.adopted is None
    if is_anywhere and len(stores) < len(delivery.runtime.stores):
        _leave(delivery, "its message does not say which store has its row, and one does not answer")
    asked = [there for there, _ in stores]
    if _is_forged(delivery, asked):
        raise Forged(f"task {delivery.request.id}: not what its row has")
    _warn_of_missing_row(delivery.task.name, delivery.request, asked)
    raise Copy(f"task {delivery.request.id}: a copy of what runs, was finished, or is in the dead set")


def _lock(delivery: Delivery, run: Run) -> bool:
    """Lock the row in one store, or make a locked row; False if the delivery is a copy there, or forged."""
    there = run.runtime
    if delivery.adopted is not None:
        run.content = delivery.adopted.content
        admission = waiting_in(delivery.task.app, delivery.task.name, delivery.adopted.queue)
        return durable_runs.adopt(there, run, replace(delivery.adopted, admission=admission), delivery.terms)
    run.content = as_kept(there, run.key, run.content)
    is_here = delivery.request.id in RUNS
    return durable_runs.begin(there, run, delivery.address, terms=delivery.terms, is_here=is_here)


def _is_forged(delivery: Delivery, stores: Sequence[Runtime]) -> bool:
    key = delivery.key
    try:
        return key is not None and any(is_forged(there, key, delivery.content) for there in stores)
    except StoreUnavailableError:
        return False  # it must not run in any case


def _note_begun(delivery: Delivery, run: Run) -> None:
    task, request = delivery.task, delivery.request
    run.stopping = partial(own_process.is_to_stop, task.app, run.key, place=run.runtime.store.place)
    for ours in (HEADER, *OF_THE_PARENT):  # a body may pass its headers on to the tasks that it calls
        (request.headers or {}).pop(ours, None)
    if request.chord:
        run.is_counted = chords.install(task.app, task.backend)
    measuring.task_begun(run)
    request.sidejob_run = run  # on the request: another delivery of this id may come and go in a thread
    RUNS[request.id] = run


def _stores_or_leave(delivery: Delivery) -> Sequence[tuple[Runtime, int]]:
    """Return the stores that may have the row, each with this worker's identity there; without any, do not begin."""
    runtime, skips = delivery.runtime, delivery.key is not None and delivery.runtime.stores.several
    known = [(runtime.at(runtime.stores[place]), worker_id) for place, worker_id in delivery.request.get(WORKER) or ()]
    stores = [(there, worker_id) for there, worker_id in known if not (skips and there.store.is_left_alone)]
    if not stores:
        _leave(delivery, "this worker is not known, or not just now, in the store that has its row")
    return stores


def _leave(delivery: Delivery, why: str) -> NoReturn:
    """Refuse to begin a task whose row is in a store that does not answer, or does not know this worker.

    With one store the next message would fail in the same way, and so would this message after its return to the
    broker: so this waits a little. With several stores the worker must go on with the tasks of the others.
    """
    has_others = delivery.runtime.stores.several or delivery.address.store is not None
    if delivery.key is None or not has_others:
        time.sleep(random.uniform(*PAUSE_S))
    raise _left(delivery.request, why)


def _left(request: Context, why: str) -> Left:
    logger.warning("Task %s does not begin now: %s", request.id, why)
    return Left(why)


def content_of(request: Context) -> Content:
    """Return the content that the delivery runs; without a digest from the parent it matches no row."""
    digest = request.get(DIGEST)
    known = str(digest) if isinstance(digest, Digest) else ""
    return Content(str(request.task), known, unpacker(request.get("compression")))


WARN_S = 60.0
"""Seconds for which this process logs no further warning, for any task."""

_KEYS_OF_A_FIRST = {"v", "n", "s"}

_told: set[str] = set()
"""The names of the tasks that were warned about."""
_told_at = -WARN_S


def _warn_of_missing_row(task: str, request: Context, stores: Sequence[Runtime]) -> None:
    """Warn, once for each task, if a delivery that looks like the first of its message has no row in these stores.

    Most such deliveries are copies of tasks that have ended, and harmless. But if a client keeps its rows in another
    schema or database than its workers, its tasks never run, and that would go unnoticed.
    """
    global _told_at
    if task in _told or time.monotonic() < _told_at + WARN_S or not is_first(request.__dict__):
        return
    try:
        for there in stores:
            row = there.connections.read(lambda executor: tasks.read(executor, request.id), within_s=there.wait_s)
            if row is not None:
                return  # it runs, or waits as a retry
    except StoreUnavailableError:
        return
    _told.add(task)
    _told_at = time.monotonic()
    logger.warning(
        "%s[%s] has no row in schema %r, so it is not run: a copy of one that has ended, or its client has another "
        "sidejob_schema or sidejob_database_url. This is logged once for each task.",
        task,
        request.id,
        stores[0].settings.schema,
    )


def is_first(request: Mapping[str, Any]) -> bool:
    """Tell whether a delivery is plainly the first of its message, and its row unchanged since it was kept.

    It is not a retry or a message that has waited for an eta, was published or delivered again, or may have a copy in
    another store. For a copy that only looks like the first, as from a restored broker, the warning is needless.
    """
    header = request.get(HEADER)
    if not isinstance(header, Mapping) or header.get("n") != 1 or not header.keys() <= _KEYS_OF_A_FIRST:
        return False
    if request.get("retries") or request.get("eta") or request.get(REPUBLISHED) or request.get("redelivered"):
        return False
    properties = request.get("properties") or {}
    if request.get("x-delivery-count") or properties.get("delivery_count"):
        return False
    return not (request.get("delivery_info") or {}).get("redelivered")
