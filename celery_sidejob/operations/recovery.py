"""Freeing what a worker held: rescued because it was lost, or released because the worker stops or cannot run it."""

from __future__ import annotations

import time
from typing import Any

from ..model.errors import StoreUnavailableError
from ..model.status import Status
from ..store import askings, asks, claims, jobs, packets
from ..store.statement import Executor
from .endings import bury, close_asking, error_json
from .hold import PAUSE_S
from .noted_asks import apply_noted_asks
from .runtime import Aftermath, Move, Runtime
from .touched import Touched
from .wakes import Wakes

SHUTDOWN_LOST = "The job was terminated, but its shutdown was lost with its worker too often to be tried again."


def rescue(
    runtime: Runtime, job_id: int, *, run_no: int, worker_id: int, own: bool = False, loss: bool = True,
    wait: bool = False,
) -> bool:  # fmt: skip
    """Take a lost run from its worker, in one transaction; the job is queued again with its inputs intact.

    The worker must have been declared dead, unless it rescues its `own` run. The loss counts towards `max_losses`,
    unless it was none: the worker had left as planned. A job that somebody has locked is left for the next look, unless
    this is to `wait`. Returns whether the run was taken.
    """
    return _free(runtime, job_id, run_no=run_no, worker_id=worker_id, own=own, loss=loss, wait=wait)


def release(
    runtime: Runtime, job_id: int, *, run_no: int, worker_id: int, wait: bool = False, moved: bool = False
) -> bool:
    """Have a worker give back a run of its own, as `rescue` does, but without a loss: it does not run it after all.

    `moved`: another reader had packets that the run had read, so the next one takes them before it goes on with them.
    """
    return _free(runtime, job_id, run_no=run_no, worker_id=worker_id, own=True, loss=False, wait=wait, moved=moved)


def rescue_own(runtime: Runtime, job_id: int, *, run_no: int, worker_id: int) -> None:
    """Rescue a run of this process that cannot go on for want of the store; waits a lease for it.

    If the store stays away, the worker finds by itself that it holds what it does not run.
    """
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            rescue(runtime, job_id, run_no=run_no, worker_id=worker_id, own=True, wait=True)
            return
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                return
            time.sleep(PAUSE_S)


def _free(
    runtime: Runtime, job_id: int, *, run_no: int, worker_id: int, own: bool, loss: bool, wait: bool,
    moved: bool = False,
) -> bool:  # fmt: skip
    def work(executor: Executor) -> Aftermath | None:
        job = jobs.lock(executor, [job_id]).get(job_id) if wait else jobs.lock_if_free(executor, job_id)
        if job is None:
            return None
        return _free_locked(runtime, executor, job, run_no=run_no, worker_id=worker_id, own=own, loss=loss, moved=moved)

    aftermath = runtime.connections.transact("rescue" if loss else "release", work)
    if aftermath is None:
        return False
    runtime.follow(aftermath)
    apply_noted_asks(runtime, aftermath.noted)
    return True


def _free_locked(
    runtime: Runtime, executor: Executor, job: Any, *, run_no: int, worker_id: int, own: bool, loss: bool, moved: bool
) -> Aftermath | None:
    aftermath = Aftermath()
    most = job.max_losses or runtime.settings.max_losses
    if loss and job.losses + 1 >= most:
        # What is noted and committed by now came before the end. The lock is held, this only reads what became of it.
        Wakes(runtime, executor, Touched.of_row(executor, job), aftermath).apply_due(job.id)
        job = jobs.lock(executor, [job.id])[job.id]
    row = claims.release(executor, job.id, run_no=run_no, worker_id=worker_id, own=own, loss=loss)
    if row is None:
        return None
    readers = packets.release(executor, job.id, run_no)
    if loss:
        aftermath.calls.append(lambda observer: observer.lost(job.id, job.task, run_no))
    if loss and row.losses >= most:
        _put_to_rest(runtime, executor, job, row, run_no, aftermath)
        if row.parent_id is not None:
            readers.add(row.parent_id)
    else:
        armed = claims.rearm(
            executor, job.id, for_run=run_no + 1, look_after_s=runtime.settings.lost_after, moved=moved
        )
        aftermath.ring(job, armed)
        aftermath.moves.append(Move(job.id, job.task, job.status, row.status, run_no))
        if loss:
            aftermath.calls.append(lambda observer: observer.recovered(job.id, job.task, run_no))
    if readers:  # not locked here, so their asks are only noted
        asks.note(executor, readers, "run")
        aftermath.noted += readers
    return aftermath


def _put_to_rest(runtime: Runtime, executor: Executor, job: Any, row: Any, run_no: int, aftermath: Aftermath) -> None:
    """Put to rest a job whose runs kept killing their workers; a termination is honoured all the same."""
    terminating = row.status == Status.TERMINATING
    message = SHUTDOWN_LOST if terminating else f"{row.losses} runs in a row were lost with their workers."
    error = error_json("WorkerLostError", message, "billiard.exceptions")
    outcome = Status.TERMINATED if terminating else Status.FAILED
    task_id = close_asking(runtime, executor, job, outcome=outcome, result=error, aftermath=aftermath)
    if terminating and job.terminate_tree:  # its shutdown, which would have handed this down, is given up
        below = jobs.child_ids(executor, job.id)
        asks.note(executor, below, "terminate_tree")
        aftermath.noted += below
    if terminating and row.asked_again:  # a forced run was asked for while it was terminating
        claims.put_to_rest(executor, job.id, status=Status.QUEUED, error=error)
        task_id = askings.open_next(executor, job.id)
        armed = claims.rearm(
            executor, job.id, for_run=run_no + 1, task_id=task_id, look_after_s=runtime.settings.lost_after
        )
        aftermath.ring(job, armed)
        aftermath.moves += [
            Move(job.id, job.task, job.status, outcome, run_no), Move(job.id, job.task, outcome, Status.QUEUED),
        ]  # fmt: skip
        return
    claims.put_to_rest(executor, job.id, status=outcome, error=error)
    claims.disarm(executor, job.id)
    if terminating:
        asks.drop_runs(executor, job.id)
    bury(
        executor, job, reason="shutdown lost" if terminating else "lost", error=error, traceback=None,
        task_id=task_id, retries=0, aftermath=aftermath, wake_pending=row.asked_again,
    )  # fmt: skip
    aftermath.moves.append(Move(job.id, job.task, job.status, outcome, run_no, task_id))
