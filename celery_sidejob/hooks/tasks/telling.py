"""Reports the outcome of a durable task's run to the result backend, exactly once, even if the backend is unreachable.

An unreachable backend does not change the body's outcome. If a success cannot be reported, the end of the run reports
it later, and keeps the row until then (`operations/ledger/durable_ends.py`). A failure is reported for up to a lease;
after that only the dead set has the failure. For parts of a chord both take up to an hour: no other process knows that
a part has ended, and its chord would wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery import states
from celery.app.task import Context
from celery.exceptions import SoftTimeLimitExceeded
from kombu.exceptions import ContentDisallowed, DecodeError, EncodeError

from ...model.durable import ADOPTED, HEADER
from ...model.logger import logger
from ...model.names import storable, text_of
from ...operations.ledger.durable_ends import LATE_END_PATIENCE_S
from ...operations.ledger.durable_runs import Run
from ...operations.runtime import PAUSE_S
from ...results.chords import AWAY
from .. import bodies
from ..patches import result_backend
from . import chords, ending
from .present import present_run, run_of_request

UNREADABLE = (DecodeError, ContentDisallowed)
"""Errors of a result backend that cannot read its own data; Celery's backends read before they store."""


def install(backend: Any) -> None:
    """Report durable tasks to a backend in this way; a second call has no effect."""
    result_backend.tell_by(
        backend,
        store_result=partial(_store, backend),
        mark_as_done=partial(_done, backend),
        mark_as_failure=partial(_failed, backend),
        mark_as_retry=_retried,
        chord_error_from_stack=partial(chords.fail_unlocked, backend),
        _call_task_errbacks=partial(_call_errbacks, backend),
    )
    backend.tells_of_durable_tasks = True


def _store(
    backend: Any, store: Callable[..., Any], task_id: str, result: Any, state: str, *args: Any, **options: Any
) -> Any:
    """Store a result; a durable task runs even if its start cannot be reported to the backend.

    The stored result may be unreadable, for example from a worker with another `result_serializer`: then it is
    replaced.
    """
    try:
        try:
            return store(task_id, result, state, *args, **options)
        except UNREADABLE as error:
            logger.warning("What the backend has of task %s is replaced: %s", task_id, text_of(error))
            backend.forget(task_id)
            return store(task_id, result, state, *args, **options)
    except Exception as error:
        request = options.get("request")
        if state != states.STARTED or request is None or not (request.get(HEADER) or request.get(ADOPTED)):
            raise
        logger.warning("%s is not shown as started: %s", task_id, error)
        return None


def _done(
    backend: Any,
    mark: Callable[..., Any],
    task_id: str,
    result: Any,
    request: Context | None = None,
    *args: Any,
    **options: Any,
) -> None:
    """Report a success; the end of the run reports what remains."""
    run = run_of_request(request)
    if run is None or request is None:
        mark(task_id, result, request, *args, **options)
        return
    if ending.ends_with_result(backend, run.runtime):
        with _refusing(), backend.riding() as riders:
            mark(task_id, result, request, *args, **options)
        run.riders = riders
        run.is_told = True
        return
    success = _Success(run, backend, request, result, lambda: mark(task_id, result, request, *args, **options))
    try:
        with _refusing():
            success.mark()
        success.is_told = True
    except EncodeError:
        raise
    except Exception as error:
        logger.warning("That task %s ended well cannot be told yet: %s", task_id, text_of(error))
    run.is_told = True
    if request.chord or not success.is_told:
        run.untold = success


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise EncodeError if the task has no such result: Celery treats this error as its failure."""
    try:
        yield
    except chords.REFUSED as error:
        raise error if isinstance(error, EncodeError) else EncodeError(text_of(error)) from error


@dataclass(slots=True)
class _Success:
    """Implements `operations.ledger.durable_runs.Untold`."""

    run: Run
    backend: Any
    request: Context
    value: Any
    mark: Callable[[], Any]
    is_told: bool = False

    @property
    def is_part(self) -> bool:
        return bool(self.request.chord)

    def tell(self) -> bool:
        try:
            if not self.is_told:
                self.mark()
                self.is_told = True
            return chords.is_settled(self.run, self.backend, self.request, self.value)
        except Exception as error:
            logger.debug("That task %s ended well cannot be told yet: %s", self.run.key[0], error)
            return False


def _failed(
    backend: Any,
    mark: Callable[..., Any],
    task_id: str,
    exc: BaseException,
    traceback: str | None = None,
    request: Context | None = None,
    *args: Any,
    **options: Any,
) -> None:
    """Report a failure, for up to a lease; but no failure that a hook or Celery raised after the outcome's report."""
    run = run_of_request(request)
    if run is None:
        mark(task_id, exc, traceback, request, *args, **options)
        return
    if run.is_told or run.moved:
        logger.error("Task %s has another outcome, after which this was raised: %s", task_id, text_of(exc))
        return
    patience_s = LATE_END_PATIENCE_S if request is not None and request.chord else run.runtime.settings.lease
    deadline = time.monotonic() + patience_s
    # An errback may read the result.
    rides = ending.ends_with_result(backend, run.runtime) and not (request is not None and request.errbacks)
    while True:
        try:
            with backend.riding() if rides else nullcontext([]) as riders:
                mark(task_id, exc, None if traceback is None else storable(str(traceback)), request, *args, **options)
            run.riders = riders
            break
        except Exception as error:
            if isinstance(error, chords.REFUSED) and traceback is not None:
                logger.exception("Task %s failed with %s, which the backend refuses", task_id, text_of(exc))
                exc, traceback = bodies.unstorable(exc, error), None
            elif isinstance(error, chords.REFUSED) or time.monotonic() > deadline:
                logger.error("That task %s failed is not told: %s", task_id, text_of(error))
                break
        time.sleep(PAUSE_S)
    run.is_told = True


def _call_errbacks(backend: Any, call: Callable[..., Any], request: Context, exc: Any, traceback: Any) -> None:
    """Call or send each errback separately, so that a failure to send one does not repeat the others.

    An errback that can never be sent is given up. If the store or the broker is unreachable, a durable run tries for a
    lease. After that the unsent errbacks remain in `request`, and the error is raised: the caller then reports the
    failure again.
    """
    run = run_of_request(request) or present_run(backend.app)
    deadline = time.monotonic() + (0.0 if run is None else run.runtime.settings.lease)
    errbacks = list(request.errbacks)
    while errbacks:
        one = copy(request)
        one.errbacks = errbacks[:1]
        try:
            call(one, exc, traceback)
        except (*AWAY, SoftTimeLimitExceeded) as error:
            if time.monotonic() > deadline:
                request.errbacks = errbacks
                raise
            logger.debug("An errback of task %s cannot be sent yet: %s", request.id, error)
            time.sleep(PAUSE_S)
            continue
        except Exception as error:
            logger.error("An errback of task %s cannot be sent: %s", request.id, text_of(error))
        del errbacks[0]


def _retried(
    mark: Callable[..., Any], task_id: str, exc: BaseException, traceback: str | None = None, **options: Any
) -> None:
    """Report a retry; the task is retried even if that fails."""
    if run_of_request(options.get("request")) is None:
        mark(task_id, exc, traceback, **options)
        return
    try:
        mark(task_id, exc, None if traceback is None else storable(str(traceback)), **options)
    except Exception as error:
        logger.warning("%s is not shown as retried: %s", task_id, text_of(error))
