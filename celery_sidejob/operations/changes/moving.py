"""Moving jobs that are in no run: to another queue, another task, other arguments, another time."""

from __future__ import annotations

from ...model.changes import Move
from ...model.errors import IllegalMoveError
from ...model.status import Status
from ...store import asks, moving
from ...store.statement import Transaction
from ..after_commit import AfterCommit
from ..lock_set import LockSet
from ..runtime import LocalRuntime
from .mailboxes import add_ports


def check_may_move(job_id: int, status: str, *, in_run: bool, has_time: bool) -> None:
    """Raise IllegalMoveError if a job with this status cannot be moved."""
    if status in (Status.TERMINATING, Status.TERMINATED):
        raise IllegalMoveError(f"Job {job_id} is {status}: it is not moved. Force a run of it first.")
    if in_run:
        raise IllegalMoveError(
            f"A run of job {job_id} is in progress: move it when that has ended, or with force=True, which takes the "
            "job from that run. In its own body call job.then()."
        )
    if has_time and status == Status.FAILED:
        raise IllegalMoveError(
            f"Job {job_id} has failed: move it without eta= and countdown=, and retry it from the dead set."
        )


def apply(
    runtime: LocalRuntime, executor: Transaction, change: Move, lock_set: LockSet, after_commit: AfterCommit
) -> bool:
    """Move a locked or new job; returns whether it must be asked to run now."""
    job_id, status, before = change.job_id, lock_set.statuses[change.job_id], lock_set.job(change.job_id)
    in_run = job_id not in lock_set.new and before.unit_no is not None
    check_may_move(job_id, status, in_run=in_run, has_time=change.has_time)
    if change.has_time:
        moving.forget_times(executor, job_id, later=change.is_later)
    moved = moving.move(
        executor, job_id, change.stage, now=change.has_time, check_interval_s=runtime.settings.lost_after
    )
    assert moved is not None  # it is locked
    add_ports(executor, job_id, change.stage.ports, after_commit)
    after_commit.silence(job_id)
    after_commit.ring(moved, moved)
    if before.pool not in (None, moved.pool):
        after_commit.pools.add(before.pool)  # it has given up a slot there
    if change.is_later:
        after = asks.set_timer(executor, job_id, due_at=change.due_at, wait_s=change.wait_s, ask="run")
        after_commit.moved(moved, status, after.status, after.changes)
        lock_set.statuses[job_id] = after.status
    return change.has_time and not change.is_later and moved.task_id is None
