"""The end of a run of a durable task: after its outcome was reported, and before a late acknowledgement.

The signals of the task call this code.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from celery import signals, states
from celery.app.task import Context
from celery.exceptions import Ignore, SoftTimeLimitExceeded

from ...model.durable import Death, Held
from ...model.errors import LeaseLostError, StoreUnavailableError
from ...model.logger import logger
from ...model.loss import Loss
from ...model.names import text_of
from ...model.status import RunEnd
from ...operations.after_commit import result_of
from ...operations.gates import capacity, queues
from ...operations.ledger import burials, durable_ends, durable_runs
from ...operations.ledger.durable_runs import Run, lease_lost
from ...operations.runs import measuring
from ...operations.runtime import Runtime
from ...results.backend import PostgresBackend
from ...store.results import Ended
from .. import bodies
from ..worker import pool_process
from .present import RUNS, run_of

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


def ends_with_result(backend: Any, runtime: Runtime) -> bool:
    """Tell whether the results of a backend are in the store that has the row: the end writes its result."""
    return isinstance(backend, PostgresBackend) and backend.is_in(runtime.connections)


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
    over = Ended(Held(*run.key, run.worker_id, run.held_at), result)
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


def death_of(error: BaseException, request: Context, trace: str | None = None) -> Death:
    """Return the death of a task that has failed with an error."""
    text = f"{type(error).__name__}: {text_of(error)}"
    trace = trace or bodies.traceback_of(error)
    return Death("failed", text, trace, request.retries or 0, bodies.group_of(error))
