"""A run of a job in its process: prepare, body, end. Celery's tracer sees only the outcome."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

from celery.app.task import Context
from celery.exceptions import Ignore

from ...jobs.job import Job
from ...jobs.log_entries import context
from ...jobs.running import RetryRun, RunningJob
from ...model import values
from ...model.changes import Ask
from ...model.crash_points import Died
from ...model.errors import DependencyFailedError, LeaseLostError, PortFullError, StoreUnavailableError
from ...model.events import JobMoved, LeaseLost
from ...model.logger import logger
from ...model.loss import Loss, LossKind
from ...model.status import RunEnd, Status
from ...operations.hold import BeginsAgainError, Hold
from ...operations.runs import recovery
from ...operations.runs.endings import Ending
from ...operations.runs.runs import NO_END, InputsMovedError
from ...operations.runtime import Runtime
from ...store.borrowed.borrowed import is_trouble
from ...store.errors import RowsLocked, first_line
from ...unit.open_unit import NoRoom, OpenUnit, Suspend, within
from .. import bodies
from ..errors import TaskRevokedError as RevokedError
from ..events import Terminated
from ..on_commit import OnCommit
from ..worker import own_process
from ..worker.pool_process import worker_is_stopping
from .ending import (
    end_run,
    fail,
    raise_suspended,
    retry,
    show,
    terminate_too,
    terminate_too_fast,
    terminated_after,
    wait_for_room,
)


class TaskBody(OnCommit):
    """The part of a sidejob task that its runs use; `SideJobTask` adds the part for its callers."""

    abstract = True

    def startup(self, job: RunningJob) -> None:
        """Called before the first run, and committed with it."""

    def shutdown(self, job: RunningJob) -> None:
        """Called when the job is terminated; an error is logged, and the job is terminated all the same."""

    def run_body(self, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the body through the project's own ``__call__``, if its task class has one."""
        call = bodies.call_of(self, TaskBody)
        value = self.run(job, *args, **kwargs) if call is None else call(self, job, *args, **kwargs)
        return bodies.result_of(value, f"The body of {self.name}, or one of its hooks,")

    def run_hook(self, which: str, job: RunningJob) -> None:
        """Run the startup or the shutdown like the body: through the project's own ``__call__``.

        ``__call__`` calls `run` of its task, so it gets a copy of this task whose `run` is the hook, with the body's
        own arguments: it may need them to prepare the run. The task itself may be running in other threads.
        """
        hook = getattr(self, "_hooks", {}).get(which) or getattr(self, which)  # decorated functions come first
        if hook == getattr(TaskBody, which).__get__(self):
            return  # this task has no such hook
        stand_in = object.__new__(type(self))
        stand_in.__dict__.update(self.__dict__, run=lambda job, *args, **kwargs: hook(job))
        stand_in.run_body(job, job.args, job.kwargs)


def run_claimed(task: TaskBody, runtime: Runtime, hold: Hold, request: Context) -> Any:
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
        if not own_process.is_left(task.app, hold.key, error):
            raise
        loss = Loss.of_body(own_process.ident(task.app), error)
        why = loss.redacted(runtime.settings.redacted).why
        logger.error("Run %d of job %d is lost: %s", hold.run_no, hold.job_id, why)
        recovery.rescue_own(runtime, hold, loss)
        raise Ignore(f"job {hold.job_id}: its body left") from None


def _opened(task: TaskBody, runtime: Runtime, hold: Hold) -> tuple[OpenUnit, RunningJob]:
    """Return the first unit of a run and its job, and announce that the job runs."""
    unit, row = OpenUnit(runtime, hold), hold.row
    unit.stopping = partial(own_process.is_to_stop, task.app, hold.key)
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
        case LeaseLostError():
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
def _inside(task: TaskBody, unit: OpenUnit, job: RunningJob, row: Any, request: Context) -> Iterator[None]:
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


def _run(task: TaskBody, unit: OpenUnit, job: RunningJob, row: Any) -> Any:
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
        return fail(unit, error, own_process.limit(error, task.app, task, job.request))
    _end(task, unit, row, ending)
    return value


def _end_unless_owed(task: TaskBody, unit: OpenUnit, row: Any, options: dict[str, Any]) -> None:
    """End the run without calling the body, if there is a reason not to call it."""
    if _expired(options, row):
        fail(unit, RevokedError(f"The asking {row.task_id} expired before it ran."))
    if own_process.is_revoked(task.app, row.task_id):
        fail(unit, RevokedError(f"The asking {row.task_id} was revoked before it ran."))
    if row.failed_by is not None:
        why = f"Job {row.failed_by}, on which this one depended, has failed or was terminated."
        fail(unit, DependencyFailedError(why))
    if row.came_late:
        terminate_too(unit.runtime, unit.hold)
    if row.is_too_soon:
        terminate_too_fast(unit.runtime, unit.hold)


def _completion(task: TaskBody, unit: OpenUnit, value: Any, options: dict[str, Any]) -> Ending:
    """Return the ending of a run whose body has returned this value."""
    results = unit.runtime.results
    wanted = results.wanted(task.name, options) or options.get("link") or options.get("called")
    if options.get("link") or options.get("chain"):
        results.connect()
    result = values.encode(value, what="result") if wanted else "null"
    then, wait_s = unit.then or (None, 0.0)
    return Ending(RunEnd.COMPLETED, result=result, then=then, retry_in_s=wait_s)


def _end(task: TaskBody, unit: OpenUnit, row: Any, ending: Ending) -> None:
    """End a run whose body has returned or suspended; raises what Celery is to see if that is not the body's value."""
    try:
        ended = end_run(unit, unit.unit, ending)
    except NO_END:
        raise
    except PortFullError as error:
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


def _value(task: TaskBody, unit: OpenUnit, job: RunningJob) -> Any:
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
    if isinstance(error, SystemExit | KeyboardInterrupt | Died) or own_process.is_kill(error):
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


def _lost_store(error: BaseException) -> StoreUnavailableError:
    """Return the error for which a run is given up when its body's own connection has seen the store fail."""
    return StoreUnavailableError(f"The store failed, as the body's own connection has seen: {first_line(error)}")


def _shut_down(task: TaskBody, unit: OpenUnit, job: RunningJob) -> NoReturn:
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
