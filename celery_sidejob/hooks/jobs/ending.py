"""The end of a run of a job: completed, failed, suspended, tried again or terminated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from celery.app.task import Task
from celery.exceptions import Ignore, MaxRetriesExceededError, Retry, SoftTimeLimitExceeded
from celery.exceptions import TaskRevokedError as CeleryTaskRevokedError

from ...jobs import log_entries
from ...jobs.running import RetryRun
from ...model.changes import Terminate
from ...model.errors import FullPort, IllegalMoveError, PortFullError, TaskRevokedError
from ...model.logger import logger
from ...model.messages import Outcome
from ...model.names import text_of
from ...model.status import RunEnd, Status
from ...operations.hold import Hold
from ...operations.runs import endings, recovery, run_pages
from ...operations.runs.endings import Ending, error_json
from ...operations.runs.runs import NO_END, Unit
from ...operations.runtime import Runtime
from ...store import asks
from ...unit.open_unit import OpenUnit, Suspend, within
from ..bodies import group_of, traceback_of, unstorable
from ..events import Suspended
from ..worker import pool_process


def end_run(unit: OpenUnit, last: Unit | None, ending: Ending) -> str:
    """End the run with its `last` unit; follow-ups of the commit (callbacks, signals) are no part of that.

    A soft time limit that strikes now comes too late: it was raised in the middle of our statement, which is therefore
    repeated. If the first try was committed after all, the second finds the run over (LeaseLostError).
    """
    unit.end()
    if last is None:
        ending = replace(ending, asked=unit.unit.changes)  # the unit was discarded: only these changes survive
    elif _leave(unit, last, ending):
        run_pages.leave(unit.runtime, unit.hold)
        return str(Status.COMPLETED)
    with within(None):
        try:
            return endings.end(unit.runtime, unit.hold, last, ending)
        except SoftTimeLimitExceeded:
            return endings.end(unit.runtime, unit.hold, last, ending)


def _leave(unit: OpenUnit, last: Unit, ending: Ending) -> bool:
    """Leave the end of the run to the worker, if that can write it."""
    over = run_pages.to_leave(unit.runtime, unit.hold, last, ending)
    return over is not None and pool_process.leave_end(over, "end:before-commit")


def fail(unit: OpenUnit, error: BaseException, shown: BaseException | None = None) -> NoReturn:
    """End the run as failed: its unit is discarded, its inputs are as they were, the asking ends with the error.

    With `shown` it ends with that error, but Celery gets `error` all the same. If the store refuses the error, the run
    ends with another error, and the log has the first: otherwise the run would not end, and begin again.
    """
    unit.discard()
    reason = "revoked" if isinstance(error, TaskRevokedError | CeleryTaskRevokedError) else "failed"
    try:
        end_run(unit, None, failed(shown or error, reason))
    except NO_END:
        raise
    except Exception as refusal:
        logger.exception("Job %d failed with %s, which cannot be stored", unit.hold.job_id, text_of(error))
        end_run(unit, None, failed(unstorable(error, refusal), reason))
    raise error


def failed(error: BaseException, reason: str = "failed") -> Ending:
    """Return the ending of a run that raised `error`."""
    trace = traceback_of(error)
    text = _error_json(error, trace)
    return Ending(RunEnd.FAILED, result=text, error=text, traceback=trace, reason=reason)


def _error_json(error: BaseException, trace: str) -> str:
    return error_json(type(error).__name__, text_of(error), type(error).__module__, trace, group_of(error))


def terminated_after(unit: OpenUnit, error: BaseException) -> Ending:
    """Discard the unit of a shutdown that raised, and return the ending that keeps the error with the job."""
    unit.discard()
    if isinstance(error, Suspend | RetryRun):
        verb = "suspend" if isinstance(error, Suspend) else "retry"
        error = IllegalMoveError(
            f"The shutdown of job {unit.hold.job_id} has called {verb}(), and a shutdown is not run again: the job is "
            "terminated. Do in on_shutdown only what needs no further run."
        ).with_traceback(error.__traceback__)
    trace = traceback_of(error)
    return Ending(RunEnd.TERMINATED, error=_error_json(error, trace), traceback=trace)


def retry(task: Task, unit: OpenUnit, row: Any, again: RetryRun) -> Any:
    """Discard the unit and have the run tried again; fail if the retries are used up."""
    unit.discard()
    of_task = getattr(task, "override_max_retries", None)
    of_task = of_task if of_task is not None else task.max_retries
    most = again.max_retries if again.max_retries is not None else of_task
    if most is not None and row.retries >= most:
        used_up = MaxRetriesExceededError(f"Can't retry {task.name} any more.", task_args=(), task_kwargs={})
        return fail(unit, again.exc or used_up)
    countdown = again.countdown if again.countdown is not None else task.default_retry_delay
    cause = again.exc
    error = _error_json(cause, traceback_of(cause)) if cause is not None else None
    wait_s = 0.0 if task.request.is_eager else float(countdown)
    ended = end_run(unit, None, Ending(RunEnd.RETRIED, retry_in_s=wait_s, error=error))
    if ended == Status.QUEUED:
        show(task, unit.runtime, row, "retry", error)
    raise Retry(exc=cause, when=countdown)


def wait_for_room(task: Task, unit: OpenUnit, row: Any, full: Sequence[FullPort]) -> NoReturn:
    """Discard the unit and suspend the run until the ports have room for it; fail if they never could."""
    unit.discard()
    try:
        ended = end_run(unit, None, Ending(RunEnd.SUSPENDED, waits_for=full))
    except PortFullError as error:
        fail(unit, error)
    raise_suspended(task, unit, row, ended)


def raise_suspended(task: Task, unit: OpenUnit, row: Any, ended: str) -> NoReturn:
    if ended == Status.SUSPENDED:
        show(task, unit.runtime, row, Status.SUSPENDED)
        raise Suspended(f"job {row.id} is suspended")
    raise Ignore(f"job {row.id} was asked again before it was suspended")


def terminate_too(runtime: Runtime, hold: Hold) -> NoReturn:
    """Terminate a job that was adopted while its parent was terminated recursively; it does not run."""
    with within(None):
        recovery.terminate_instead(runtime, hold, [Terminate(hold.job_id, tree=True)])
    logger.info("The parent of job %d was terminated with all below it. It is terminated too.", hold.job_id)
    raise Ignore(f"job {hold.job_id} is terminated with its parent")


def terminate_too_fast(runtime: Runtime, hold: Hold) -> NoReturn:
    """Terminate a job that was asked to run more often than its rate allows; its body is not called."""
    told = f"Job {hold.job_id} was terminated: it was asked to run more often than its run_rate allows."
    with within(None):
        entry = log_entries.error_entry(runtime, {"job": hold.job_id, "run": hold.run_no}, told, None)
        recovery.terminate_instead(runtime, hold, [Terminate(hold.job_id), *([entry] if entry else [])])
    logger.warning("%s", told, extra={"job_id": hold.job_id, "task": hold.row.task})
    raise Ignore(f"job {hold.job_id} is terminated by its run rate")


def show(task: Task, runtime: Runtime, row: Any, state: str, told: str | None = None) -> None:
    """Show in the result backend that the asking is still open, its state, and its error or progress.

    It may have ended elsewhere by now, and that end may have been stored before this; then the outcome is stored again.
    """
    options = json.loads(row.options) if row.options else None
    asking = Outcome(row.task_id, row.id, task.name, row.queue, state, told or "null", options, row.args, row.kwargs)
    with within(None):
        if row.task_id is None or not runtime.results.show(asking):
            return
        now = asks.outcome(runtime.connections, row.task_id)
        if now is not None and now.outcome is not None:
            runtime.results.show(replace(asking, outcome=now.outcome, result=now.result))
