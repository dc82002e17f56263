"""The end of a run of a durable task: after its outcome was told, and before a late acknowledgement.

The signals of the task tell of it.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from celery import signals, states
from celery.app.task import Context
from celery.exceptions import Ignore, SoftTimeLimitExceeded

from ...model.durable import Death, Held
from ...model.errors import LeaseLostError, StoreUnavailableError
from ...model.loss import Loss
from ...model.status import RunEnd
from ...operations import burials, capacity, durable_ends, durable_locks, measuring, permits
from ...operations.durable_runs import Run, lease_lost
from .. import bodies
from . import quiet_end
from .present_run import RUNS, run_of

logger = logging.getLogger("celery_sidejob")

SURELY_HELD_S = 0.25
"""How soon after its beginning a run has ended, if nobody can have called its worker dead since."""


def install() -> None:
    """Listen to what Celery tells of a task's end; twice does no harm."""
    signals.task_failure.connect(_failed, weak=False, dispatch_uid="celery_sidejob.durable")
    signals.task_postrun.connect(_over, weak=False, dispatch_uid="celery_sidejob.durable")


def is_awaited(task: Any, run: Run) -> bool:
    """Tell whether its end is acted upon: by tasks that follow it, or by a caller that waits for its result.

    A result alone is told at once where nobody can have taken the row yet.
    """
    request = task.request
    if request.callbacks or request.chain or request.chord:
        return True
    if run.is_held and time.monotonic() - run.began_at < SURELY_HELD_S:
        return False
    return run.runtime.results.wanted(task.name, {"ignore_result": request.ignore_result})


def check_that_it_counts(run: Run, error: Exception | None = None) -> None:
    """Let nobody hear of a run whose row was taken from it: backends keep the first success that they are told of."""
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
    """Count a run as lost whose body has left, by `sys.exit()` for one, while its process goes on."""
    loss = Loss.of_body(worker, error)
    logger.error("The run of task %s is lost: %s", run.key[0], loss.redacted(run.runtime.settings.redacted).why)
    run.is_lost = True
    with suppress(StoreUnavailableError):  # otherwise the worker finds what it holds and does not run
        durable_locks.give_back(run.runtime, [run.key[0]], worker_id=run.worker_id, loss=loss)
    raise Ignore(f"task {run.key[0]}: its body left") from None


def give_up(run: Run, error: Exception, *, repeats: bool) -> NoReturn:
    """End a run that cannot go on as another message, as somebody has locked what it needs: no task fails for that.

    It begins again without a loss if its task `repeats`; otherwise it is lost.
    """
    logger.warning("The run of task %s is given up: %s", run.key[0], error)
    run.is_lost = True
    with suppress(StoreUnavailableError):  # otherwise the worker finds what it holds and does not run
        durable_locks.give_back(
            run.runtime, [run.key[0]], worker_id=run.worker_id, loss=Loss(cause=str(error)), begun=not repeats
        )
    raise Ignore(f"task {run.key[0]} is given up") from None


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
        except (SoftTimeLimitExceeded, MemoryError):  # they are of the body, and strike once
            run.end_is_unknown = True
            _end(sender, run, state, retval)
    except LeaseLostError as error:
        logger.warning("%s", error)
    except StoreUnavailableError as error:
        # The row stays held. If this process does not end it later, as it tries to for a success, it is found by the
        # worker, which does not run it any more: as if it had been lost.
        logger.error("The end of task %s could not be written: %s", run.key[0], error)
    except Exception as error:  # the store refuses it: so it is not held for ever, and not repeated
        logger.exception("The end of task %s cannot be written as it is", run.key[0])
        _bury(run, sender.request, bodies.unstorable(run.error, error))
    finally:
        if RUNS.get(run.key[0]) is run:  # the next try may have begun in another thread
            del RUNS[run.key[0]]
        permits.freed(run.runtime, run.slot_in)
        followers = [message.admission.pool.name for message in run.follows if message.admission is not None]
        capacity.ring(run.runtime, [run.pool, *followers])


def _end(task: Any, run: Run, state: str | None, retval: Any) -> None:
    runtime, request = run.runtime, task.request
    if run.moved:
        measuring.task_ended(run, RunEnd.RETRIED if state == states.RETRY else RunEnd.COMPLETED)
    if run.moved or run.is_lost or _is_cut_off(run, state):
        return  # it goes on as another message; or this process is about to end, and the worker sees to it
    if state == states.IGNORED or (state == states.SUCCESS and run.is_told):
        if state == states.SUCCESS and _is_left_to_worker(run):
            measuring.task_ended(run, RunEnd.COMPLETED)
            return
        durable_ends.end(runtime, run)
        measuring.task_ended(run, RunEnd.COMPLETED)
        return
    if state == states.REJECTED and getattr(retval, "requeue", False):
        durable_locks.put_back(runtime, run)
    else:
        raised = run.error or (retval if isinstance(retval, BaseException) else sys.exc_info()[1])
        assert raised is not None, state
        _bury(run, request, raised, run.traceback)


def _is_left_to_worker(run: Run) -> bool:
    """Leave the removal of the row to the worker, if nothing else is left to be done; tells whether it was."""
    if run.held_at is None or run.follows or run.untold is not None or run.is_revoked:
        return False
    return quiet_end.end(Held(*run.key, run.worker_id, run.held_at), "durable-end:before")


def _bury(run: Run, request: Context, error: BaseException, trace: str | None = None) -> None:
    trace = trace or bodies.traceback_of(error)
    death = Death("failed", error_text(error), trace, request.retries or 0, bodies.group_of(error))
    failed = burials.fail(
        run.runtime, run.key, death, by="run", worker_id=run.worker_id, patient=not run.has_waited,
        unknown=run.end_is_unknown,
    )  # fmt: skip
    if failed:
        measuring.task_ended(run, RunEnd.FAILED)


def _is_cut_off(run: Run, state: str | None) -> bool:
    """Whether the process was told to stop before its outcome, or while a success was being told.

    Celery calls its receivers on the way out, and of what it raises just then tells them nothing.
    """
    return state in (None, states.SUCCESS) and not run.is_told and not isinstance(sys.exc_info()[1], Exception)


def error_text(error: BaseException) -> str:
    """Return an error as the dead set shows it."""
    return f"{type(error).__name__}: {bodies.text_of(error)}"
