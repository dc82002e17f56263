"""A run of a durable task: its beginning, which locks the row or goes no further, and its end, which removes the row.

The class of an exception tells the worker's parent why a delivery runs nothing. The end comes after the outcome was
reported, and before a late acknowledgement: the signals of the task call it.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from celery import signals, states
from celery.app.task import Context
from celery.exceptions import Ignore, SoftTimeLimitExceeded

from ...model import durable
from ...model.errors import LeaseLostError, StoreUnavailableError
from ...model.logger import logger
from ...model.loss import Loss
from ...model.names import text_of
from ...model.status import RunEnd
from ...operations.after_commit import result_of
from ...operations.gates import capacity, queues
from ...operations.gates.queues import AtGateError
from ...operations.ledger import burials, durable_ends, durable_runs
from ...operations.ledger.durable_runs import Run, as_kept, is_forged, lease_lost
from ...operations.runs import measuring
from ...operations.runtime import Runtime
from ...store.outbox import tasks
from ...store.results import Ended
from .. import bodies
from ..apps import runtime_for
from ..broker.connection import PAUSE_S
from ..call_options import waiting_in
from ..messages.kept_message import unpacker
from ..worker import pool_process, recording
from ..worker.received import OF_THE_PARENT
from . import results
from .present import RUNS, run_of
from .results import ends_with_result


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
    key: durable.Key | None
    """The key of its row; None if its publisher has made no row."""
    address: durable.Address
    content: durable.Content
    adopted: durable.Message | None
    """The message from which to make a row, if there is none."""

    @classmethod
    def of(cls, task: Any, request: Context) -> Delivery:
        """Read the message; raises Ignore for a newer format."""
        header = request.get(durable.HEADER)
        key = durable.key_of(request.id, header)
        adopted = request.get(durable.ADOPTED) if key is None else None
        if key is None and adopted is None:
            # Its row is in the store: the message is sent again when it has been silent for a while.
            logger.warning("Task %s is left to newer workers: its message is of a newer format", request.id)
            raise Ignore(f"task {request.id}: its message is of a newer format")
        runtime = runtime_for(task.app, f"{task.name} is durable")
        return cls(task, request, runtime, key, durable.Address.of(header), content_of(request), adopted)

    @property
    def terms(self) -> durable.Terms:
        """The process and the rules for losses, as `durable_runs` records them."""
        most = self.task.max_losses or self.runtime.settings.max_losses
        return durable.Terms(os.getpid(), self.task.lost_policy, most)

    def run_in(self, there: Runtime, worker_id: int) -> Run:
        """Return its run, before its begin, for one store and this worker's identity there."""
        return Run(self.key or (self.request.id, 1), self.task.name, worker_id, there, self.content)


def begin(task: Any, request: Context) -> None:
    """Lock the row of a delivery; raises Copy, Forged or Left if it must not, or cannot, begin."""
    try:
        recording.begin(task.app)
        delivery = Delivery.of(task, request)
        held: durable.HeldRun | None = request.get(durable.HELD)
        if held is None or not _begin_held(delivery, held):
            _begin_locked(delivery, _stores_or_leave(delivery))
    except SoftTimeLimitExceeded:  # the limit is meant for the body
        if run_of(task) is not None:
            raise
        raise _left(request, "its time limit struck while it waited for its lock") from None


def _begin_held(delivery: Delivery, held: durable.HeldRun) -> bool:
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
    run.stopping = partial(pool_process.is_to_stop, task.app, run.key, place=run.runtime.store.place)
    for ours in (durable.HEADER, *OF_THE_PARENT):  # a body may pass its headers on to the tasks that it calls
        (request.headers or {}).pop(ours, None)
    if request.chord:
        run.is_counted = results.install_counting(task.backend)
    measuring.task_begun(run)
    request.sidejob_run = run  # on the request: another delivery of this id may come and go in a thread
    RUNS[request.id] = run


def _stores_or_leave(delivery: Delivery) -> Sequence[tuple[Runtime, int]]:
    """Return the stores that may have the row, each with this worker's identity there; without any, do not begin."""
    runtime, skips = delivery.runtime, delivery.key is not None and delivery.runtime.stores.several
    known = [
        (runtime.at(runtime.stores[place]), worker_id)
        for place, worker_id in delivery.request.get(durable.WORKER) or ()
    ]
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


def content_of(request: Context) -> durable.Content:
    """Return the content that the delivery runs; without a digest from the parent it matches no row."""
    digest = request.get(durable.DIGEST)
    known = str(digest) if isinstance(digest, durable.Digest) else ""
    return durable.Content(str(request.task), known, unpacker(request.get("compression")))


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
    header = request.get(durable.HEADER)
    if not isinstance(header, Mapping) or header.get("n") != 1 or not header.keys() <= _KEYS_OF_A_FIRST:
        return False
    if request.get("retries") or request.get("eta") or request.get(durable.REPUBLISHED) or request.get("redelivered"):
        return False
    properties = request.get("properties") or {}
    if request.get("x-delivery-count") or properties.get("delivery_count"):
        return False
    return not (request.get("delivery_info") or {}).get("redelivered")


SURELY_HELD_S = 0.25
"""Seconds after its beginning within which a run's worker cannot have been declared dead."""


def install() -> None:
    """Listen to Celery's signals about a task's end; a second call has no effect."""
    signals.task_failure.connect(_failed, weak=False, dispatch_uid="celery_sidejob.durable")
    signals.task_postrun.connect(_over, weak=False, dispatch_uid="celery_sidejob.durable")


def is_awaited(task: Any, run: Run) -> bool:
    """Tell whether consequences precede its end: tasks that follow it, or a caller that waits for its result.

    A result in the same store is written by the end.

    A result alone is reported at once if no process can have taken the row yet.
    """
    request = task.request
    if ends_with_result(task.backend, run.runtime):
        return False
    if request.callbacks or request.chain or request.chord:
        return True
    if run.is_held and time.monotonic() - run.began_at < SURELY_HELD_S:
        return False
    return run.runtime.results.wanted(task.name, {"ignore_result": request.ignore_result})


def check_that_it_counts(run: Run, error: Exception | None = None) -> None:
    """Raise if the row was taken from a run, before its outcome is reported: backends keep the first success."""
    ended_well = error is None
    if run.moved:
        return
    try:
        counts = durable_ends.counts(run.runtime, run, ended_well=ended_well)
    except SoftTimeLimitExceeded:  # it is meant for the body, and strikes once
        counts = durable_ends.counts(run.runtime, run, ended_well=ended_well)
    if not counts:
        run.is_lost = True
        logger.warning("%s%s", lease_lost(run), "" if ended_well else f" It raised {error!r}.")
        raise Ignore(f"task {run.key[0]} was taken from this run") from None


def lose(run: Run, error: BaseException, worker: str | None) -> NoReturn:
    """Count a run as lost if its body raised an exception such as `sys.exit()` while its process goes on."""
    loss = Loss.of_body(worker, error)
    logger.error("The run of task %s is lost: %s", run.key[0], loss.redacted(run.runtime.settings.redacted).why)
    _give_back(run, loss)
    raise Ignore(f"task {run.key[0]}: its body left") from None


def give_up(run: Run, error: Exception, *, repeats: bool) -> NoReturn:
    """End a run that cannot go on as another message, because rows are locked: no task fails for that.

    It begins again without a loss if its task `repeats`; otherwise it is lost.
    """
    logger.warning("The run of task %s is given up: %s", run.key[0], error)
    _give_back(run, Loss(cause=str(error)), begun=not repeats)
    raise Ignore(f"task {run.key[0]} is given up") from None


def _give_back(run: Run, loss: Loss, *, begun: bool = True) -> None:
    """Give the row of a run back that ends without an outcome."""
    run.is_lost = True
    with suppress(StoreUnavailableError):  # otherwise the worker finds this run, which it holds and does not execute
        durable_runs.give_back(run.runtime, [run.key[0]], worker_id=run.worker_id, loss=loss, begun=begun)


def _failed(sender: Any = None, einfo: Any = None, **_: Any) -> None:
    run = run_of(sender)
    if run is not None:
        run.traceback = str(einfo.traceback) if einfo is not None else None


def _over(sender: Any = None, retval: Any = None, state: str | None = None, **_: Any) -> None:
    run = run_of(sender)
    if run is None:
        return
    try:
        try:
            _end(sender, run, state, retval)
        except (SoftTimeLimitExceeded, MemoryError):  # they belong to the body, and strike once
            run.end_is_unknown = True
            _end(sender, run, state, retval)
    except LeaseLostError as error:
        logger.warning("%s", error)
    except StoreUnavailableError as error:
        # The row stays held. If this process does not end it later, as it tries to after a success, the worker finds
        # the row, which it no longer executes, and treats it as lost.
        logger.error("The end of task %s could not be written: %s", run.key[0], error)
    except Exception as error:  # the store refuses it: so the row is not held for ever, and the run not repeated
        logger.exception("The end of task %s cannot be written as it is", run.key[0])
        _bury_refused(sender, run, bodies.unstorable(run.error, error))
    finally:
        if RUNS.get(run.key[0]) is run:  # the next try may have begun in another thread
            del RUNS[run.key[0]]
        queues.freed(run.runtime, run.slot_in)
        followers = [message.admission.pool.name for message in run.follows if message.admission is not None]
        capacity.ring(run.runtime, [run.pool, *followers])


def _end(task: Any, run: Run, state: str | None, retval: Any) -> None:
    runtime, request = run.runtime, task.request
    if run.moved:
        measuring.task_ended(run, RunEnd.RETRIED if state == states.RETRY else RunEnd.COMPLETED)
    if run.moved or run.is_lost or _is_cut_off(run, state):
        return  # it goes on as another message; or this process is about to end, and the worker handles the row
    if state == states.IGNORED or (state == states.SUCCESS and run.is_told):
        if state == states.SUCCESS and _is_left_to_worker(run):
            measuring.task_ended(run, RunEnd.COMPLETED)
            return
        durable_ends.end(runtime, run)
        measuring.task_ended(run, RunEnd.COMPLETED)
        return
    if state == states.REJECTED and getattr(retval, "requeue", False):
        durable_runs.put_back(runtime, run)
    else:
        raised = run.error or (retval if isinstance(retval, BaseException) else sys.exc_info()[1])
        assert raised is not None, state
        if state == states.REJECTED and ends_with_result(task.backend, runtime):
            # The worker's parent calls errbacks; before Celery 5.7 nobody told of this end.
            stores = not request.ignore_result
            task.backend.mark_as_failure(run.key[0], raised, None, request, stores, call_errbacks=False)
        _bury(run, request, raised, run.traceback)


def _is_left_to_worker(run: Run) -> bool:
    """Leave the removal of the row to the worker, if only a small result remains to be kept; tells whether it does."""
    result = result_of(run.riders)
    if run.held_at is None or run.follows or run.untold is not None or run.is_revoked:
        return False
    if run.riders and (result is None or not result.is_small):
        return False
    over = Ended(durable.Held(*run.key, run.worker_id, run.held_at), result)
    return pool_process.leave_end(over, "durable-end:before")


def _bury(run: Run, request: Context, error: BaseException, trace: str | None = None) -> None:
    failed = burials.fail(
        run.runtime,
        run.key,
        death_of(error, request, trace),
        by="run",
        worker_id=run.worker_id,
        patient=not run.has_waited,
        unknown=run.end_is_unknown,
        riders=run.riders,
    )
    if failed:
        measuring.task_ended(run, RunEnd.FAILED)


def _bury_refused(task: Any, run: Run, error: BaseException) -> None:
    """Bury a run whose end the store has refused, and write this error as its result, unless that is refused too."""
    if run.riders:
        run.is_told = False
        task.backend.mark_as_failure(run.key[0], error, None, task.request, not task.request.ignore_result)
        try:
            _bury(run, task.request, error)
            return
        except StoreUnavailableError:
            raise
        except Exception:
            run.riders.clear()
    _bury(run, task.request, error)


def _is_cut_off(run: Run, state: str | None) -> bool:
    """Whether the process was told to stop before its outcome, or while a success was being reported.

    Celery calls its receivers on the way out, without the exception that it is raising then.
    """
    return state in (None, states.SUCCESS) and not run.is_told and not isinstance(sys.exc_info()[1], Exception)


def death_of(error: BaseException, request: Context, trace: str | None = None) -> durable.Death:
    """Return the death of a task that has failed with an error."""
    text = f"{type(error).__name__}: {text_of(error)}"
    trace = trace or bodies.traceback_of(error)
    return durable.Death("failed", text, trace, request.retries or 0, bodies.group_of(error))
