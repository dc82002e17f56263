"""One delivery in a worker, as a pipeline: claim, prepare, body, end. Celery's tracer sees only the outcome."""

from __future__ import annotations

import json
import logging
import traceback as tracebacks
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from celery.app.task import Context
from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded
from celery.exceptions import TaskRevokedError as CeleryTaskRevokedError

from ..job import enqueue
from ..model import values
from ..model.errors import InvalidValueError, LeaseLostError, StoreUnavailableError, TaskRevokedError
from ..model.messages import Outcome
from ..model.status import Status
from ..open_unit import OpenUnit, outside_of_runs
from ..operations import recovery, runs
from ..operations.runs import Ended, Ending, Hold, InputsMovedError, Unit
from ..operations.runtime import Runtime
from ..running import RetryRun, RunningJob, Suspend
from ..scopes import context
from ..store import askings
from .publishing import HEADER
from .revocation import TaskRevokedError as RevokedError
from .stopping import worker_is_stopping
from .task import SideJobTask, hook_of

logger = logging.getLogger("celery_sidejob")

WORKER = "sidejob_worker"
"""The request's key for the identity under which the worker claims; set by the parent for each delivery."""


def run_delivery(task: SideJobTask, request: Context) -> Any:
    """Run the job that a delivery names, if its run is still owed, and return the body's value.

    Ends as `Ignore` for Celery when there is nothing to tell: a stale delivery, a suspended or a refused run.
    """
    header = request.get(HEADER)
    runtime = task._runtime
    worker_id = request.get(WORKER)
    if worker_id is None:
        raise Ignore(f"job {header['job']}: this worker has no identity in the store yet; the sweeper sends it again")
    hold = runs.claim(runtime, header["job"], for_run=header["for_run"], worker_id=worker_id)
    if hold is None:
        raise Ignore(f"job {header['job']}: stale delivery for run {header['for_run']}")
    return run_claimed(task, runtime, hold, request)


def adopt_delivery(task: SideJobTask, request: Context, args: Any, kwargs: Any) -> Any:
    """Make a job of a message that a client without this package published for a sidejob task.

    The message's task id is the asking's, so that a second delivery of it makes no second job.
    """
    runtime = task._runtime
    if task._repeated(request.id) is None:
        options = {
            "link": request.callbacks, "link_error": request.errbacks, "chain": request.chain, "chord": request.chord,
            "group_id": request.group, "group_index": request.group_index, "root_id": request.root_id,
            "parent_id": request.parent_id, "reply_to": request.reply_to,
        }  # fmt: skip
        given = {key: value for key, value in options.items() if value is not None}
        queue = (request.delivery_info or {}).get("routing_key")
        try:
            enqueue(runtime, task, tuple(args), kwargs, queue=queue, task_id=request.id, **given)
        except InvalidValueError:
            if task._repeated(request.id) is None:  # otherwise the other delivery was quicker
                raise
    raise Ignore(f"task {request.id} is a job now")


def run_claimed(task: SideJobTask, runtime: Runtime, hold: Hold, request: Context) -> Any:
    """Run what was claimed, and end the run whatever happens."""
    row = hold.row
    task = task.app.tasks.get(row.task, task)  # a doorbell left over from another schema may name another task
    unit = OpenUnit(runtime, hold)
    unit.stopping = worker_is_stopping
    job = RunningJob(unit, row)
    unit.job = job
    try:
        with _inside(task, unit, job, row, request):
            if hold.kind == "shutdown":
                return _shut_down(task, runtime, unit, job)
            return _run(task, runtime, unit, job, row)
    except InputsMovedError as error:
        logger.warning("%s The run begins again.", error)
        recovery.take_back(
            runtime, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, own=True, loss=False, wait=True
        )
        raise Ignore(str(error)) from None
    except LeaseLostError as error:
        logger.warning("%s", error)
        raise Ignore(str(error)) from None
    except StoreUnavailableError as error:
        # A read of the body found no store, or the end could not be written for a whole lease. That is not the job's
        # failure: nothing of the uncommitted unit was applied, and the run begins again.
        logger.error("Run %d of job %d is given up: %s", hold.run_no, hold.job_id, error)
        recovery.give_back(runtime, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id)
        raise Ignore(str(error)) from None


@contextmanager
def _inside(task: SideJobTask, unit: OpenUnit, job: RunningJob, row: Any, request: Context) -> Iterator[None]:
    """Make the run what `current_job` and `self.request` show, and its packets tell who wrote them."""
    shown = Context(dict(request.__dict__))
    options = json.loads(row.options) if row.options else {}
    shown.update(
        id=row.task_id or request.id, args=job.args, kwargs=job.kwargs, retries=row.retries,
        group=options.get("group_id"), chord=options.get("chord"), chain=options.get("chain"),
        callbacks=options.get("link"), errbacks=options.get("link_error"), called_directly=False,
    )  # fmt: skip
    job.request = shown
    task.push_request(**shown.__dict__)
    try:
        with unit.active(), context(job=job.id):
            yield
    finally:
        task.pop_request()


def _run(task: SideJobTask, runtime: Runtime, unit: OpenUnit, job: RunningJob, row: Any) -> Any:
    hold = unit.hold
    options = json.loads(row.options) if row.options else {}
    if _expired(options, row):
        return _fail(task, runtime, unit, RevokedError(f"The asking {row.task_id} expired before it ran."))
    unit.look()
    try:
        if not hold.started:
            hook_of(task, "startup")(job)
        try:
            value = task.run_body(job, job.args, job.kwargs)
        except Suspend:
            unit.settle()
            raise
        unit.settle()
        result = values.encode(value, what="result") if _wants_result(runtime, task, options) else "null"
        ending = Ending(Status.COMPLETED, result=result)
    except Suspend:
        ending, value = Ending(Status.SUSPENDED), None
    except RetryRun as again:
        return _retry(task, runtime, unit, row, again)
    except (LeaseLostError, InputsMovedError, StoreUnavailableError):
        raise
    except (SystemExit, KeyboardInterrupt):
        raise  # this process is to end: what it held is rescued or given back
    except BaseException as error:
        return _fail(task, runtime, unit, error)
    try:
        ended = _end(runtime, hold, unit.unit, ending)
    except (LeaseLostError, InputsMovedError, StoreUnavailableError):
        raise
    except Exception as error:  # the commit refused what the unit asks for: a name was taken, a job deleted meanwhile
        return _fail(task, runtime, unit, error)
    if ending.outcome == Status.SUSPENDED:
        if ended.status == Status.SUSPENDED:
            _show(runtime, task, row, Status.SUSPENDED)
        raise Ignore(f"job {job.id} is suspended")
    return value


def _shut_down(task: SideJobTask, runtime: Runtime, unit: OpenUnit, job: RunningJob) -> None:
    last = unit.unit
    try:
        hook_of(task, "shutdown")(job)
        unit.settle()
        last = unit.unit
    except (LeaseLostError, InputsMovedError, StoreUnavailableError):
        raise
    except (Exception, Suspend, RetryRun):
        logger.exception("The shutdown of job %d raised; it is terminated all the same", job.id)
        unit.discard()
        last = unit.unit
    try:
        _end(runtime, unit.hold, last, Ending(Status.TERMINATED))
    except (LeaseLostError, InputsMovedError, StoreUnavailableError):
        raise
    except Exception:
        logger.exception("What the shutdown of job %d did cannot be committed; it is terminated all the same", job.id)
        unit.discard()
        _end(runtime, unit.hold, unit.unit, Ending(Status.TERMINATED))


def _end(runtime: Runtime, hold: Hold, unit: Unit | None, ending: Ending) -> Ended:
    """End the run; what follows its commit (callbacks, signals) is no part of the unit, which is over.

    A soft time limit that strikes now comes too late: it was raised in the middle of our statement, so that is
    repeated. If the first one was committed after all, the second finds the run over (LeaseLostError).
    """
    with outside_of_runs():
        try:
            return runs.end(runtime, hold, unit, ending)
        except SoftTimeLimitExceeded:
            return runs.end(runtime, hold, unit, ending)


def _show(runtime: Runtime, task: SideJobTask, row: Any, state: str, error: str | None = None) -> None:
    """Show in the result backend that the asking is still open, and how it stands.

    It may have ended elsewhere by now; whoever ended it may have stored that before us, so what counts is stored again.
    """
    options = json.loads(row.options) if row.options else None
    asking = Outcome(row.task_id, row.id, task.name, row.queue, state, error or "null", options, row.args, row.kwargs)
    with outside_of_runs():
        if row.task_id is None or not runtime.results.show(asking):
            return
        now = askings.outcome(runtime.connections, row.task_id)
        if now is not None and now.outcome is not None:
            runtime.results.show(replace(asking, outcome=now.outcome, result=now.result))


def _retry(task: SideJobTask, runtime: Runtime, unit: OpenUnit, row: Any, again: RetryRun) -> Any:
    """Discard the unit and have the run tried again, or fail when the retries are used up."""
    unit.discard()
    if not task.retries_left(row.retries, again.max_retries):
        return _fail(task, runtime, unit, task.out_of_retries(again.exc))
    countdown = again.countdown if again.countdown is not None else task.default_retry_delay
    cause = again.exc
    error = _error_json(cause) if cause is not None else None
    ended = _end(runtime, unit.hold, None, Ending(Status.FAILED, retry_in_s=float(countdown), error=error))
    if ended.status == Status.QUEUED:
        _show(runtime, task, row, "retry", error)
    raise Retry(exc=cause, when=countdown)


def _fail(task: SideJobTask, runtime: Runtime, unit: OpenUnit, error: BaseException) -> Any:
    """End the run as failed: its unit is discarded, its inputs are as they were, the asking ends with the error."""
    unit.discard()
    reason = "revoked" if isinstance(error, TaskRevokedError | CeleryTaskRevokedError) else "failed"
    _end(runtime, unit.hold, None, failed(error, reason))
    raise error


def failed(error: BaseException, reason: str = "failed") -> Ending:
    """Return the ending of a run that raised `error`."""
    text = _error_json(error)
    trace = "".join(tracebacks.format_exception(error))
    return Ending(Status.FAILED, result=text, error=text, traceback=trace.replace("\x00", "\ufffd"), reason=reason)


def _error_json(error: BaseException) -> str:
    trace = "".join(tracebacks.format_exception(error)).replace("\x00", "\ufffd")
    try:
        message = str(error)
    except Exception:
        message = f"<{type(error).__name__} whose str() raises>"
    return runs.error_json(type(error).__name__, message, type(error).__module__, trace)


def _wants_result(runtime: Runtime, task: SideJobTask, options: dict[str, Any]) -> bool:
    return bool(runtime.results.wanted(task.name, options) or options.get("link") or options.get("chain"))


def _expired(options: dict[str, Any], row: Any) -> bool:
    """Tell whether the asking's `expires` passed before its first run; once begun an asking does not expire."""
    expires = options.get("expires")
    if not expires or row.run_no > 1 or row.started:
        return False
    if "at" in expires:
        return datetime.now(UTC) > datetime.fromisoformat(expires["at"])
    return bool(datetime.now(UTC).timestamp() > row.created_at.timestamp() + float(expires["after_s"]))
