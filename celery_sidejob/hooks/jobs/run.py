"""A run of a job in its process: begin, prepare, body, end. Celery's tracer sees only the outcome.

A delivery claims the run that it names, or becomes a job. In a managed queue a delivery is a permit: it may run another
job than the job it names. A run ends completed, failed, suspended, tried again or terminated.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Celery
from celery.app.task import Context, Task
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry, SoftTimeLimitExceeded
from celery.exceptions import TaskRevokedError as CeleryTaskRevokedError

from ...jobs import log_entries
from ...jobs.job import enqueue, find_by_task_id
from ...jobs.log_entries import context
from ...jobs.running import RetryRun, RunningJob
from ...model import errors, values
from ...model.changes import Ask, Terminate
from ...model.crash_points import Died
from ...model.durable import HELD, WORKER
from ...model.events import JobMoved, LeaseLost
from ...model.logger import logger
from ...model.loss import Loss, LossKind
from ...model.messages import Outcome, is_readable
from ...model.names import text_of
from ...model.status import RunEnd, Status
from ...operations.hold import BeginsAgainError, Hold
from ...operations.runs import endings, recovery, run_pages, runs
from ...operations.runs.endings import Ending, error_json
from ...operations.runs.run_pages import RunKey
from ...operations.runs.runs import NO_END, InputsMovedError, Unit
from ...operations.runtime import Runtime
from ...store import asks, claims
from ...store.borrowed.borrowed import is_trouble
from ...store.errors import RowsLocked, first_line
from ...unit.open_unit import NoRoom, OpenUnit, Suspend, within
from ..bodies import group_of, traceback_of, unstorable
from ..broker.connection import PAUSE_S
from ..errors import TaskRevokedError as RevokedError
from ..events import Suspended, Terminated
from ..messages.doorbell import HEADER
from ..worker import pool_process, recording
from ..worker.pool_process import worker_is_stopping
from ..worker.received import OF_THE_PARENT

if TYPE_CHECKING:
    from .sidejob_task import SideJobTask


def run_delivery(task: SideJobTask, runtime: Runtime, request: Context) -> Any:
    """Run the job that a delivery names, if its run is still owed, and return the body's value.

    Raises Celery's `Ignore` if there is nothing to report: for a stale delivery, a suspended or a refused run.
    """
    header = request.get(HEADER)
    if not is_readable(header):
        # The store knows what is owed: the message is published again when it has been silent for a while.
        logger.warning("A message for a job is of format %s, which this version does not read", header["v"])
        raise Ignore("a message of a newer format is left to newer workers")
    recording.begin(task.app)
    worker_id = request.get(WORKER)
    if worker_id is None:
        raise Ignore(f"job {header['job']}: this worker has no identity in the store yet; the sweeper sends it again")
    claimed: run_pages.Claimed | None = request.get(HELD)
    for ours in OF_THE_PARENT:  # a body may pass its headers on to the tasks that it calls
        (request.headers or {}).pop(ours, None)
    hold = (
        run_pages.begin(runtime, claimed)
        if claimed is not None
        else runs.claim(
            runtime,
            header["job"],
            task=request.task,
            for_run=header["for_run"],
            worker_id=worker_id,
            queue=runtime.tasks.delivered_from(request.delivery_info or {}),
            tasks=partial(like, task, request),
        )
    )
    if hold is None:
        _tell_if_forged(runtime, header["job"], request.task)
        raise Ignore(f"job {header['job']}: stale delivery for run {header['for_run']}")
    with turned(task.app, (header["job"], header["for_run"]), (hold.job_id, hold.run_no)):
        return run_claimed(task.app.tasks[hold.row.task], runtime, hold, request)


def _tell_if_forged(runtime: Runtime, job_id: int, task: str) -> None:
    """Log a doorbell for a job of another task: it is forged, or from a schema in which this id was another job's."""
    row = None
    with suppress(errors.StoreUnavailableError):
        row = claims.outcome(runtime.connections, job_id)
    if row is not None and row.task != task:
        logger.error(
            "A message for job %d is rejected: it names the task %s, and the job's is %s",
            job_id,
            task,
            row.task,
            extra={"job_id": job_id, "task": row.task},
        )


def adopt_delivery(task: SideJobTask, runtime: Runtime, request: Context, args: Any, kwargs: Any) -> Any:
    """Make a job of a message that a client without this package published for a sidejob task.

    The message's task id becomes the asking's, so that a second delivery makes no second job. Until then only the
    message exists: `JobRequest` acknowledges it after this, and without a store it goes back to the broker.
    """
    try:
        _adopt(task, runtime, request, args, kwargs)
    except (errors.StoreUnavailableError, errors.SchemaError, SoftTimeLimitExceeded) as error:
        # The time limit is meant for the body. Without the pause the message would come and go without end.
        pause_s = random.uniform(*PAUSE_S)
        logger.warning("Message %s cannot become a job and goes back to the broker: %s", request.id, error)
        time.sleep(pause_s)
        raise Reject(error, requeue=True) from None
    raise Ignore(f"task {request.id} is a job now")


def _adopt(task: SideJobTask, runtime: Runtime, request: Context, args: Any, kwargs: Any) -> None:
    if find_by_task_id(runtime, request.id) is None:
        options = {
            "link": request.callbacks,
            "link_error": request.errbacks,
            "chain": request.chain,
            "chord": request.chord,
            "group_id": request.group,
            "group_index": request.group_index,
            "root_id": request.root_id,
            "parent_id": request.parent_id,
            "reply_to": request.reply_to,
            "shadow": request.shadow,
            "ignore_result": request.ignore_result or None,
        }
        options["time_limit"], options["soft_time_limit"] = request.timelimit or (None, None)
        given = {key: value for key, value in options.items() if value is not None}
        queue = runtime.tasks.delivered_from(request.delivery_info or {})
        try:
            enqueue(runtime, task, tuple(args), kwargs, queue=queue, task_id=request.id, **given)
        except errors.InvalidValueError:
            if find_by_task_id(runtime, request.id) is None:  # otherwise the other delivery was faster
                raise


def like(task: Any, request: Context) -> Sequence[str]:
    """Return the sidejob tasks whose runs this delivery may begin: they have the time limits and lease of its task.

    Celery has set the limits before the run was chosen. A delivery with its own limits is only for the job that it
    names.
    """
    if any(request.timelimit or ()):
        return ()
    limits = _limits(task)
    return [
        name for name, other in task.app.tasks.items() if getattr(other, "sidejob", False) and _limits(other) == limits
    ]


@contextmanager
def turned(app: Celery, named: RunKey, run: RunKey) -> Iterator[None]:
    """Within the block the delivery of one run executes another; the worker's parent learns of it."""
    if run == named:
        yield
        return
    beside = pool_process.runs_beside(app, named)
    if beside is not None:  # a thread, or a greenlet
        beside.turned(named, run)
        yield
        return
    pool_process.write_run(run)
    try:
        yield
    finally:
        pool_process.write_run(None)


def _limits(task: Any) -> tuple[Any, ...]:
    return task.time_limit, task.soft_time_limit, task.lease


def run_claimed(task: SideJobTask, runtime: Runtime, hold: Hold, request: Context) -> Any:
    """Execute a claimed run, and end it whatever happens."""
    unit, job = _opened(task, runtime, hold)
    try:
        with _inside(task, unit, job, hold.row, request):
            if hold.kind == "shutdown":
                _shut_down(task, unit, job)
            return _run(task, unit, job, hold.row)
    except NO_END as error:
        _give_up(runtime, hold, error)
        raise Ignore(str(error)) from None
    except BaseException as error:
        if not pool_process.is_left(task.app, hold.key, error):
            raise
        loss = Loss.of_body(pool_process.ident(task.app), error)
        why = loss.redacted(runtime.settings.redacted).why
        logger.error("Run %d of job %d is lost: %s", hold.run_no, hold.job_id, why)
        recovery.rescue_own(runtime, hold, loss)
        raise Ignore(f"job {hold.job_id}: its body left") from None


def _opened(task: SideJobTask, runtime: Runtime, hold: Hold) -> tuple[OpenUnit, RunningJob]:
    """Return the first unit of a run and its job, and announce that the job runs."""
    unit, row = OpenUnit(runtime, hold), hold.row
    unit.stopping = partial(pool_process.is_to_stop, task.app, hold.key)
    job = RunningJob(unit, row)
    unit.job = job
    unit.told.show = partial(show, task, runtime, row, "progress")
    if hold.kind == "run" and not row.is_too_soon:
        moved = JobMoved(row.id, row.task, Status.QUEUED, Status.RUNNING, row.changes, hold.run_no, row.task_id)
        runtime.observer.tell(moved)
    return unit, job


def _give_up(runtime: Runtime, hold: Hold, error: BaseException) -> None:
    """Give up a run that makes no end: it begins again, or belongs to another worker."""
    match error:
        case BeginsAgainError():
            moved_inputs = isinstance(error, InputsMovedError)
            logger.warning("%s The run begins again%s.", error, ", and takes its packets first" if moved_inputs else "")
            recovery.release(
                runtime, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, wait=True, takes=moved_inputs
            )
        case errors.LeaseLostError():
            logger.warning("%s", error)
            runtime.observer.tell(LeaseLost(hold.row.id, hold.row.task, hold.run_no))
        case RowsLocked():
            # Another open transaction is in the way of the end, or of the body's calls: no loss, and no outage.
            # Meanwhile this process is free for other runs.
            logger.warning("Run %d of job %d is given up and begins again: %s", hold.run_no, hold.job_id, error)
            recovery.rescue_own(runtime, hold, None)
        case _:
            # A read of the body found no store, or the end could not be written for a whole lease. That is not the
            # job's failure: nothing of the uncommitted unit was applied, and the run begins again.
            logger.error("Run %d of job %d is given up: %s", hold.run_no, hold.job_id, error)
            recovery.rescue_own(runtime, hold, Loss(LossKind.STORE, cause=str(error)))


@contextmanager
def _inside(task: SideJobTask, unit: OpenUnit, job: RunningJob, row: Any, request: Context) -> Iterator[None]:
    """Make the run visible to `current_job` and `self.request`, and name it as the writer of its packets."""
    shown = copy(request)
    options = json.loads(row.options) if row.options else {}
    shown.update(
        id=row.task_id or request.id,
        args=job.args,
        kwargs=job.kwargs,
        retries=row.retries,
        group=options.get("group_id"),
        chord=options.get("chord"),
        chain=options.get("chain"),
        callbacks=options.get("link"),
        errbacks=options.get("link_error"),
        called_directly=False,
    )
    job.request = shown
    task.request_stack.push(shown)
    try:
        with within(unit), context(job=job.id):
            yield
    finally:
        task.pop_request()
        unit.end()
        unit.job = None  # a reference cycle: the packets that the run has read would wait for the garbage collector


def _run(task: SideJobTask, unit: OpenUnit, job: RunningJob, row: Any) -> Any:
    """Run the body, and end the run in the way in which the body ends."""
    options = json.loads(row.options) if row.options else {}
    _end_unless_owed(task, unit, row, options)
    try:
        value = _value(task, unit, job)
        ending = _completion(task, unit, value, options)
    except Suspend:
        ending, value = Ending(RunEnd.SUSPENDED), None
    except RetryRun as again:
        return retry(task, unit, row, again)
    except NoRoom as ports:
        wait_for_room(task, unit, row, ports.full)
    except NO_END:
        raise
    except BaseException as error:
        _raise_if_not_its_own(unit, error)
        return fail(unit, error, pool_process.limit(error, task.app, task, job.request))
    _end(task, unit, row, ending)
    return value


def _end_unless_owed(task: SideJobTask, unit: OpenUnit, row: Any, options: dict[str, Any]) -> None:
    """End the run without calling the body, if there is a reason not to call it."""
    if _expired(options, row):
        fail(unit, RevokedError(f"The asking {row.task_id} expired before it ran."))
    if pool_process.is_revoked(task.app, row.task_id):
        fail(unit, RevokedError(f"The asking {row.task_id} was revoked before it ran."))
    if row.failed_by is not None:
        why = f"Job {row.failed_by}, on which this one depended, has failed or was terminated."
        fail(unit, errors.DependencyFailedError(why))
    if row.came_late:
        terminate_too(unit.runtime, unit.hold)
    if row.is_too_soon:
        terminate_too_fast(unit.runtime, unit.hold)


def _completion(task: SideJobTask, unit: OpenUnit, value: Any, options: dict[str, Any]) -> Ending:
    """Return the ending of a run whose body has returned this value."""
    results = unit.runtime.results
    wanted = results.wanted(task.name, options) or options.get("link") or options.get("called")
    if options.get("link") or options.get("chain"):
        results.connect()
    result = values.encode(value, what="result") if wanted else "null"
    then, wait_s = unit.then or (None, 0.0)
    return Ending(RunEnd.COMPLETED, result=result, then=then, retry_in_s=wait_s)


def _end(task: SideJobTask, unit: OpenUnit, row: Any, ending: Ending) -> None:
    """End a run whose body has returned or suspended; raises what Celery is to see if that is not the body's value."""
    try:
        ended = end_run(unit, unit.unit, ending)
    except NO_END:
        raise
    except errors.PortFullError as error:
        if not error.may_pass:
            fail(unit, error)
        wait_for_room(task, unit, row, error.full)
    except Exception as error:  # the commit refused a change of the unit: a name was taken, a job deleted meanwhile
        fail(unit, error)
    if ending.how == RunEnd.SUSPENDED:
        raise_suspended(task, unit, row, ended)
    if unit.unit.thrown_away:
        raise Ignore(f"job {row.id} was asked during its last run, and comes by its steps once more")
    if ending.then is not None:
        raise Ignore(f"job {row.id} goes on with its next stage")


def _value(task: SideJobTask, unit: OpenUnit, job: RunningJob) -> Any:
    """Run the startup, unless it is committed already, and the body; settle their last blocks, even of a suspend."""
    try:
        if not unit.hold.started:
            task.run_hook("startup", job)
            unit.finish()
        unit.begin_body()
        try:
            value = task.run_body(job, job.args, job.kwargs)
        finally:
            unit.told.write()
    except Suspend as suspend:
        unit.finish()
        if suspend.timeout_s is not None:
            unit.add(Ask(unit.hold.job_id, wait_s=suspend.timeout_s, of_wait=True))
        raise
    unit.finish(completes=True)
    return value


def _raise_if_not_its_own(unit: OpenUnit, error: BaseException) -> None:
    """Raise a body's error if it is no failure of the job: its process must end, or the store has failed."""
    if isinstance(error, SystemExit | KeyboardInterrupt | Died) or pool_process.is_kill(error):
        raise error  # its runs are rescued or given back; a killed greenlet's killer ends its run
    if worker_is_stopping():
        _let_process_end(error)
    if unit.is_trouble_of_store(error):
        raise _lost_store(error) from error


def _let_process_end(error: BaseException) -> None:
    """Raise the SystemExit by which a stopping worker ends this process, if it is behind the body's error.

    It strikes anywhere in the body, and a `with` block that then cannot roll back raises its own error on top.
    """
    behind = error.__context__
    while behind is not None:
        if isinstance(behind, SystemExit):
            raise behind
        behind = behind.__context__


def _lost_store(error: BaseException) -> errors.StoreUnavailableError:
    """Return the error for which a run is given up when its body's own connection has seen the store fail."""
    return errors.StoreUnavailableError(f"The store failed, as the body's own connection has seen: {first_line(error)}")


def _shut_down(task: SideJobTask, unit: OpenUnit, job: RunningJob) -> NoReturn:
    """Run the shutdown, and terminate the job whatever the shutdown raises; its error is kept with the job."""
    ending = Ending(RunEnd.TERMINATED)
    try:
        task.run_hook("shutdown", job)
        unit.finish()
    except NO_END:
        raise
    except (Exception, Suspend, RetryRun) as error:
        # A unit of its own would restart the count of losses: with it, trouble with another server would repeat the
        # shutdown for ever.
        if unit.is_trouble_of_store(error) or (is_trouble(error) and unit.hold.unit_no == 0):
            raise _lost_store(error) from error
        logger.exception("The shutdown of job %d raised; it is terminated all the same", job.id)
        ending = terminated_after(unit, error)
    try:
        ended = end_run(unit, unit.unit, ending)
    except NO_END:
        raise
    except Exception as error:
        logger.exception("What the shutdown of job %d did cannot be committed; it is terminated all the same", job.id)
        ending = terminated_after(unit, error)
        ended = end_run(unit, unit.unit, ending)
    if ended == Status.TERMINATED:
        raise Terminated(f"job {job.id} is terminated")
    raise Ignore(f"job {job.id} was terminated, and asked again")


def _expired(options: dict[str, Any], row: Any) -> bool:
    """Tell whether the asking's `expires` passed before its first run; after that an asking does not expire."""
    expires = options.get("expires")
    if not expires or row.run_no > 1 or row.started:
        return False
    if "at" in expires:
        return datetime.now(UTC) > datetime.fromisoformat(expires["at"])
    return bool(datetime.now(UTC).timestamp() > row.created_at.timestamp() + float(expires["after_s"]))


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
    reason = "revoked" if isinstance(error, errors.TaskRevokedError | CeleryTaskRevokedError) else "failed"
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
        error = errors.IllegalMoveError(
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


def wait_for_room(task: Task, unit: OpenUnit, row: Any, full: Sequence[errors.FullPort]) -> NoReturn:
    """Discard the unit and suspend the run until the ports have room for it; fail if they never could."""
    unit.discard()
    try:
        ended = end_run(unit, None, Ending(RunEnd.SUSPENDED, waits_for=full))
    except errors.PortFullError as error:
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
