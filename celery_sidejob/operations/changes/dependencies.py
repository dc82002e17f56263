"""Jobs that wait for other jobs: writes the dependencies, and checks which jobs are free now.

Each check has its own transaction. The end of a dependency does not lock the jobs that wait for it, because their ids
may be lower or higher, and locks are taken in the order of ids. The marks on the edges are committed with the end, so
if the process dies before the check, the sweeper makes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...model.changes import DependencyChange, NewJob, Undepend
from ...model.crash_points import reach
from ...model.errors import CycleError, HasDependentsError, IllegalMoveError
from ...model.status import Status
from ...store import dependencies, jobs
from ...store.errors import FAILURES
from ...store.statement import Reader, Transaction
from ..after_commit import AfterCommit, follow, leave_to_sweeper
from ..gates import capacity
from ..lock_set import LockSet
from ..runtime import LocalRuntime, Runtime

FAILED = frozenset({Status.FAILED, Status.TERMINATED})
"""Statuses of a dependency that has ended without completing."""


def take_turn(executor: Transaction) -> None:
    """Wait until no other transaction may close a circle; must come before any lock."""
    dependencies.take_turn(executor)


def judge(new: Sequence[NewJob], lock_set: LockSet) -> Sequence[NewJob]:
    """Return new jobs with their open dependencies only; a job with an open dependency is blocked."""
    named = {on for job in new for on, _ in job.depends_on}
    if not named:
        return new
    is_open = dependencies.open_of(lock_set.executor, named - lock_set.new.keys()) | (named & lock_set.new.keys())
    judged = [replace(job, depends_on=tuple(edge for edge in job.depends_on if edge[0] in is_open)) for job in new]
    return [replace(job, blocked=True) if job.depends_on else job for job in judged]


def add(new: Sequence[NewJob], lock_set: LockSet) -> None:
    """Write the edges of new jobs that were just inserted."""
    edges = [(job.id, on, on_failure) for job in new for on, on_failure in job.depends_on]
    if edges:
        dependencies.add(lock_set.executor, edges)
        lock_set.after_commit.looks.update(job_id for job_id, _, _ in edges)


def apply(change: DependencyChange, lock_set: LockSet) -> None:
    """Make a locked or new job depend on others, or no longer depend on them."""
    job_id, executor, after_commit = change.job_id, lock_set.executor, lock_set.after_commit
    if job_id not in lock_set.new:
        check_waits(lock_set.rows[job_id])
    if isinstance(change, Undepend):
        dependencies.undepend(executor, job_id, change.on)
        after_commit.looks.add(job_id)
        return
    new = set(change.on) & lock_set.new.keys()
    is_open = sorted(dependencies.open_of(executor, set(change.on) - new) | new)
    check_cycle(executor, job_id, is_open)
    if is_open:
        dependencies.block(executor, job_id)
        after_commit.pools.add(lock_set.job(job_id).pool)  # it has given up a slot there
        dependencies.add(executor, ((job_id, on, change.on_failure) for on in is_open))
        after_commit.silence(job_id)
        after_commit.looks.add(job_id)


def check_waits(job: Any) -> None:
    """Raise IllegalMoveError unless a job waits for its first run."""
    if job.status != Status.QUEUED or job.unit_no is not None or job.ran_at is not None:
        raise IllegalMoveError(
            f"Job {job.id} is {job.status}, and its first run has begun: dependencies can be added and removed only "
            "before that."
        )


def check_cycle(
    executor: Reader, job_id: int, on: Sequence[int], pending: Mapping[int, Iterable[int]] | None = None
) -> None:
    """Raise CycleError if one of these jobs waits for this job, directly or through others, or is this job.

    `pending` are edges that are not written yet.
    """
    pending = pending or {}
    known = {*on, *(each for ons in pending.values() for each in ons)}
    next_of: dict[int, list[int]] = {before: list(ons) for before, ons in pending.items()}
    for row in dependencies.reached(executor, known) if known else ():
        next_of.setdefault(row.job_id, []).append(row.depends_on)
    came_from: dict[int, int] = dict.fromkeys(on, job_id)
    waiting = deque(on)
    while waiting and job_id not in came_from:
        here = waiting.popleft()
        for there in next_of.get(here, ()):
            if there not in came_from:
                came_from[there] = here
                waiting.append(there)
    if job_id in came_from:
        raise cycle(job_id, came_from)


def cycle(job_id: int, came_from: Mapping[int, int]) -> CycleError:
    """Return the error for a job that would wait for itself, naming the circle."""
    way = [job_id, came_from[job_id]]
    while way[-1] != job_id:
        way.append(came_from[way[-1]])
    shown = " → ".join(map(str, reversed(way)))
    return CycleError(
        f"Job {job_id} cannot depend on job {way[-2]}: it would wait for itself ({shown}, each depends on the next)."
    )


def mark_ended(executor: Transaction, job_id: int, status: str, after_commit: AfterCommit) -> None:
    """Mark the edges to a job that rests with this status, if its dependents need not wait for it any more."""
    if status == Status.COMPLETED or status in FAILED:
        after_commit.looks |= dependencies.ended(executor, job_id, completed=status == Status.COMPLETED)


def check_no_dependents(executor: Reader, ids: Iterable[int]) -> None:
    """Raise HasDependentsError if another job depends on one of these."""
    outside = dependencies.outside(executor, ids)
    if outside:
        shown = "; ".join(
            f"{', '.join(map(str, waiting[:10]))}{' and others' if len(waiting) > 10 else ''} on job {job_id}"
            for job_id, waiting in list(outside.items())[:10]
        )
        raise HasDependentsError(
            f"Nothing is cancelled: other jobs depend on these, namely {shown}. Cancel those too "
            "(with_dependents=True), or undepend() them.",
            {job_id: tuple(waiting) for job_id, waiting in outside.items()},
        )


def with_dependents(executor: Reader, ids: Iterable[int]) -> set[int]:
    """Return these jobs and all jobs that depend on them, directly or through others."""
    found = set(ids)
    added = found
    while added:
        added = {each for waiting in dependencies.outside(executor, added).values() for each in waiting} - found
        found |= added
    return found


# -- checking --------------------------------------------------------------------------------------------------------


def look(runtime: Runtime, job_ids: Iterable[int]) -> None:
    """Free the jobs among these that no longer wait for any other job; after an error the sweeper does it."""
    for job_id in sorted(job_ids):
        try:
            look_at(runtime, job_id)
        except FAILURES as error:
            leave_to_sweeper(error, "The sweeper looks whether job %d still waits for others", job_id)
            return


def look_at(runtime: Runtime, job_id: int) -> None:
    """Confirm the new edges of a job, remove those that are over, and let its run begin if none remain."""

    def work(executor: Transaction) -> tuple[AfterCommit, bool]:
        new = dependencies.unconfirmed(executor, job_id)
        locked = jobs.lock(executor, [job_id, *new])
        if job_id not in locked:
            return AfterCommit(), False
        return _look(runtime, executor, job_id, locked), len(new) == dependencies.TOGETHER

    goes_on = True
    while goes_on:
        after_commit, goes_on = runtime.connections.transact("look", work)
        follow(runtime, after_commit)
        capacity.ring(runtime, after_commit.pools)


def _look(runtime: LocalRuntime, executor: Transaction, job_id: int, locked: Mapping[int, Any]) -> AfterCommit:
    edges = dependencies.noted_edges(executor, job_id)
    judged = {edge.depends_on: _judged(edge) for edge in edges}
    over = [on for on, what in judged.items() if what == "over"]
    failed = next((on for on, what in judged.items() if what == "failed"), None)
    new = [edge.depends_on for edge in edges if edge.state == "new" and judged[edge.depends_on] == "waits"]
    after_commit = AfterCommit()
    if failed is None:
        confirmed = [on for on in new if on in locked]  # edges added since it was locked wait for the next check
        dependencies.settle(executor, job_id, over=over, confirmed=confirmed)
    reach("look:settled")
    if failed is not None or "waits" not in judged.values():
        freed = dependencies.free(executor, job_id, failed_by=failed, check_interval_s=runtime.settings.lost_after)
        if freed is not None:
            after_commit.ring(freed, freed)
    return after_commit


def _judged(edge: Any) -> str:
    """Return the state of an edge: `over`, `failed`, or `waits`."""
    if edge.state != "new":
        return "waits" if edge.state == "kept" else str(edge.state)
    if edge.status is None or edge.status == Status.COMPLETED:
        return "over"
    if edge.status not in FAILED or edge.on_failure == "wait":
        return "waits"
    return "over" if edge.on_failure == "run" else "failed"
