"""Freeing a worker's runs: rescued because they were lost, or released because the worker stops or cannot run them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ...model.changes import Change, Log, Move
from ...model.errors import StoreUnavailableError
from ...model.events import RunLost, RunRescued, RunReturned
from ...model.logger import logger
from ...model.loss import Loss
from ...model.status import RunEnd, Status
from ...store import advisory, claims, jobs, trees
from ...store.errors import LacksRights
from ...store.statement import Transaction
from ..after_commit import AfterCommit
from ..changes.follow_up import follow_up
from ..changes.unit_of_work import Applied
from ..changes.wakes import Wakes
from ..hold import Hold
from ..lock_set import LockSet
from ..runtime import LocalRuntime, Runtime, patiently
from .endings import Ending, announce, end_job_run, error_json

SHUTDOWN_LOST = "The job was terminated, but its shutdown was lost with its worker too often to be tried again."
LOST = "WorkerLostError"
"""The class of Celery's error for a lost process."""
UNTOLD = Loss()
"""The loss of a run whose worker is forgotten: nothing is known about it."""

UNKNOWN = Ending(RunEnd.GIVEN_BACK, takes=True)
"""The ending of a run whose worker has died, if it is unknown whether the run had begun."""


def rescue(  # noqa: PLR0913 - which run, and how it is taken
    runtime: Runtime,
    job_id: int,
    *,
    run_no: int,
    worker_id: int,
    own: bool = False,
    loss: Loss | None = UNTOLD,
    wait: bool = False,
    has_begun: bool = True,
    takes: bool = False,
    undone: bool = False,
) -> bool:
    """Take a lost run from its worker, in one transaction; the job is queued again with its inputs intact.

    The worker must have been declared dead, unless it rescues its `own` run. A `loss` counts towards `max_losses`. It
    is None if the worker left as planned. A locked job is taken at a later try, unless `wait` is set. Returns whether
    the run was taken.

    Unless it `has_begun` for sure, the run was claimed in a page: then it counts as a loss only if it has committed a
    unit. The next run is claimed by its process, so that its death counts. `takes` and `undone`: see `Ending`.
    """
    given_back = Ending(RunEnd.GIVEN_BACK, takes=takes, undone=undone)
    ending = given_back if loss is None else Ending(RunEnd.LOST, loss=loss)

    def work(executor: Transaction) -> AfterCommit | None:
        job = jobs.lock(executor, [job_id], waits=wait).get(job_id)
        if job is None:
            return None
        hold = Hold(job_id, run_no, worker_id, job.run_kind, row=job)
        counts = loss is None or has_begun or job.unit_no
        return _free_locked(runtime, executor, hold, ending if counts else UNKNOWN, own=own)

    after_commit = runtime.connections.transact("release" if loss is None else "rescue", work)
    if after_commit is None:
        return False
    follow_up(runtime, after_commit)
    return True


def release(
    runtime: Runtime, job_id: int, *, run_no: int, worker_id: int, wait: bool = False, takes: bool = False
) -> bool:
    """Give back a run of this worker, like `rescue` but without a loss: the worker does not run it after all.

    `takes`: another reader took packets that the run had read, so the next run takes its packets before it uses them.
    """
    return rescue(runtime, job_id, run_no=run_no, worker_id=worker_id, own=True, loss=None, wait=wait, takes=takes)


def undo(runtime: Runtime, job_id: int, *, run_no: int, worker_id: int, wait: bool = True) -> bool:
    """Give back a run that this worker has claimed and not begun; the fetched message stays valid."""
    return rescue(runtime, job_id, run_no=run_no, worker_id=worker_id, own=True, loss=None, wait=wait, undone=True)


def terminate_instead(runtime: Runtime, hold: Hold, changes: Sequence[Change]) -> None:
    """Terminate the job of a run whose body was not called, by these changes, and give the run back; one transaction.

    If the process dies before its commit, the run is lost, and the next one is judged anew. Raises LeaseLostError if
    the run is no longer the job's current run: then the job may have been revived since.
    """

    def work(executor: Transaction) -> AfterCommit:
        applied = Applied(runtime, executor, changes, hold=hold)
        applied.lock()
        applied.apply()
        end_job_run(runtime, executor, hold, None, Ending(RunEnd.GIVEN_BACK), applied.after_commit, by_worker=True)
        return applied.after_commit

    after_commit = runtime.connections.transact("terminate", work)
    follow_up(runtime, after_commit)


def move_by_force(runtime: Runtime, change: Move, told: Log) -> None:
    """Move a job; a run in progress loses its lease, and commits nothing more.

    `told` is the entry for its history. All is one transaction. If this process dies before its commit, the run goes
    on.
    """

    def work(executor: Transaction) -> AfterCommit:
        applied = Applied(runtime, executor, [change, told])
        applied.lock()
        row = applied.lock_set.rows[change.job_id]
        if row.unit_no is not None and row.run_kind == "run":
            hold = Hold(row.id, row.run_no, row.worker_id, row.run_kind, row=row)
            ending = Ending(RunEnd.GIVEN_BACK)
            ended = end_job_run(runtime, executor, hold, None, ending, applied.after_commit, by_worker=True)
            assert ended is not None
            applied.after_commit.moved(row, row.status, ended.status, ended.changes, row.run_no)
            applied.lock_set.add_again(jobs.lock(executor, [row.id]))
        applied.apply()
        return applied.after_commit

    follow_up(runtime, runtime.connections.transact("move", work))


def rescue_own(runtime: Runtime, hold: Hold, loss: Loss | None) -> None:
    """Rescue a run of this process that cannot continue without the store; waits a lease for the store.

    If the store stays unavailable, the worker later finds that it holds a run that it does not execute.
    """

    once = partial(rescue, runtime, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)
    with suppress(StoreUnavailableError):
        patiently(runtime, partial(once, loss=loss, wait=True))


def end_holder(runtime: Runtime, job_id: int) -> None:
    """End the session whose open transaction contains the unit of a lost run, with the lock on its job.

    The process of that run is frozen or cut off, and would hold the job for as long. The next try rescues the run.
    """
    try:
        ended = runtime.connections.transact("end-holder", lambda executor: advisory.end_holders(executor, job_id))
    except LacksRights as error:
        logger.warning(
            "Job %d cannot be rescued: an open transaction of its lost run holds it, and this role may not end that "
            "session. `celery -A <app> sidejob doctor` names it. (%s)",
            job_id,
            error,
        )
        return
    for row in ended:
        logger.warning("Postgres session %d is ended: its open transaction is of a lost run of job %d", row.pid, job_id)


def _free_locked(
    runtime: LocalRuntime, executor: Transaction, hold: Hold, ending: Ending, *, own: bool
) -> AfterCommit | None:
    job = hold.row
    locked = LockSet.of_rows(runtime, executor, {job.id: job})
    after_commit = locked.after_commit
    loss = ending.loss
    if loss is not None and job.losses + 1 >= (job.max_losses or runtime.settings.max_losses):
        # Asks noted and committed by now came before the end. The lock is held; this only reads their effect.
        Wakes(locked).apply_due(job.id)
        hold.row = job = claims.read_claimed(executor, job.id)
        ending = _giving_up(runtime, job, loss)
    if loss is not None:
        shown = loss.redacted(runtime.settings.redacted)
        after_commit.events.append(RunLost(job.id, job.task, hold.run_no, shown.why, shown.facts))
    row = end_job_run(runtime, executor, hold, None, ending, after_commit, by_worker=own)
    if row is None:
        return None
    if ending.gives_up:
        if ending.gives_up == Status.TERMINATED and job.terminate_tree:  # the children too, as in its shutdown
            after_commit.trees |= trees.hand_down(executor, job.id)
        announce(hold, job.status, row, ending, after_commit)
        return after_commit
    after_commit.moved(job, job.status, row.status, row.changes, hold.run_no)
    if loss is not None or ending is UNKNOWN:
        back = RunReturned if loss is None else RunRescued
        after_commit.events.append(back(job.id, job.task, hold.run_no))
    return after_commit


def _giving_up(runtime: LocalRuntime, job: Any, loss: Loss) -> Ending:
    """Return the ending of a run that is one loss too many; a termination still takes effect."""
    losses = job.losses + 1
    lost = "The run was lost." if losses == 1 else f"{losses} runs in a row were lost; this is the last one."
    message = f"{loss.why}. {lost}"
    reason, rests = "lost", Status.FAILED
    if job.status == Status.TERMINATING:
        message, reason, rests = f"{loss.why}. {SHUTDOWN_LOST}", "shutdown lost", Status.TERMINATED
    error = error_json(LOST, message, runtime.results.module_of(LOST))
    return Ending(RunEnd.LOST, result=error, error=error, reason=reason, gives_up=rests, loss=loss)
