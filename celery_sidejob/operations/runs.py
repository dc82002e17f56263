"""The life of a run: claim it, commit its units; `endings` ends it. Every step may be repeated after a lost answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ..model.changes import Adopt, CancelTimer, Change, Disown, NewJob, RememberInputs, Terminate
from ..model.crash_points import reach
from ..model.errors import IllegalMoveError, JobNotFoundError, LeaseLostError, StoreUnavailableError
from ..model.status import Status
from ..store import claims, jobs, packets, room
from ..store.borrowed.borrowed import Borrowed, transaction_id
from ..store.claims import Try
from ..store.errors import OutcomeUnknown
from ..store.statement import Transaction
from .follow_up import follow_up
from .hold import BeginsAgainError, Hold, check_fence, lease_lost, repeat_until_known
from .lending import follow_commit_of
from .retrying import PAUSE_S
from .runtime import Runtime
from .unit_of_work import Applied

KEPT_PORTS = 1000
"""Rows of ports up to which a run keeps them for its next units; with more it begins anew."""


class InputsMovedError(BeginsAgainError):
    """Packets that this unit has read are gone."""


NO_END = (LeaseLostError, BeginsAgainError, StoreUnavailableError)
"""Errors after which a run has no end of its own: it is another worker's already, or it begins again."""


@dataclass(slots=True)
class Unit:
    """The content of one commit of a run: the packets read, and the asks and writes, in order."""

    changes: list[Change] = field(default_factory=list)
    read: list[tuple[int, int]] = field(default_factory=list)
    took: bool = False
    serial: int = field(default_factory=itertools.count().__next__)
    """Tells a snapshot of this unit from a snapshot of a unit committed since."""

    @property
    def empty(self) -> bool:
        """Whether a commit would only prove that the run is still the current one."""
        return not self.changes and not self.read

    @property
    def has_inputs(self) -> bool:
        """Whether the unit has read anything: packets, or the defaults of a turn that will not come again."""
        return bool(self.read) or any(isinstance(change, RememberInputs) for change in self.changes)

    def terminations_of(self, job_id: int) -> list[Change]:
        """Return the part that survives the unit of a run that raised: the termination of the run's own job."""
        return [change for change in self.changes if isinstance(change, Terminate) and change.job_id == job_id]

    def copy(self) -> Unit:
        """Return a snapshot to return to."""
        return Unit(list(self.changes), list(self.read), self.took, self.serial)


LOOK_MOST = 500
"""Children up to which a claim reads them. The body may not ask for any, so of more it reads none."""


def claim(runtime: Runtime, job_id: int, *, task: str, for_run: int, worker_id: int) -> Hold | None:
    """Begin the run that this delivery announces; None if the delivery is stale: it must then be forgotten.

    The job's row says which `task` it runs: a delivery with another task begins nothing.

    A claim whose answer was lost is repeated. Otherwise the job could be held by a worker that does not run it. If the
    process dies after the commit, the worker's death or its own reconciliation gives the job back.

    The hold has the job's children as of the asks that the claim has taken: if the body can see a child's end, no
    further run is owed for it. If there are more than `LOOK_MOST` children, a body that asks for them reads them later:
    it may see an end for which a further run is owed, but it misses none.
    """

    def work(executor: Transaction) -> Sequence[Any]:
        return claims.claim(executor, job_id, task=task, for_run=for_run, worker_id=worker_id, most=LOOK_MOST, how=how)

    uncertain, how = False, Try.AT_ONCE
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            found = runtime.connections.transact("claim", work, single=True)
            if found or how == (Try.AGAIN if uncertain else Try.LEAVING):
                break
            how = Try(how + 1)
        except StoreUnavailableError as error:
            uncertain = uncertain or isinstance(error, OutcomeUnknown)
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
    if not found:
        return None
    # Asks may have been left to a further run: the job is queued then, and this run is in progress.
    row = found[0] if found[0].status == Status.TERMINATING else found[0]._replace(status=str(Status.RUNNING))
    reads_them = row.run_kind == "run" and not row.has_many_children
    children = sorted(found[1:], key=attrgetter("id")) if reads_them else None
    return Hold(job_id, row.run_no, worker_id, row.run_kind, started=row.started, row=row, children=children)


def commit(runtime: Runtime, hold: Hold, unit: Unit) -> None:
    """Apply a unit of a run in one commit, or nothing of it.

    Raises LeaseLostError if the run is no longer the job's current one, InputsMovedError if another reader consumed
    packets that it had read.
    """

    def work(executor: Transaction) -> Applied:
        return _apply(runtime, executor, hold, unit)

    applied = repeat_until_known(runtime, hold, "checkpoint", work)
    hold.unit_no += 1
    hold.started = True
    if applied is not None:
        follow_up(runtime, applied.after_commit)


def commit_with(runtime: Runtime, hold: Hold, unit: Unit, borrowed: Borrowed) -> tuple[int, Callable[[], None]]:
    """Write a unit of a run into the caller's transaction; the caller commits.

    Returns the transaction's number, and a function with the work after its commit, in case we are not told of the
    commit.

    The transaction contains the lock, the fence and all buffered changes, or after an error nothing. Wakes of other
    jobs are only noted in it: the caller's transaction locks no job but the run's own.
    """
    if any(isinstance(change, Adopt | Disown) for change in unit.changes):
        raise IllegalMoveError(
            f"adopt() and disown() of job {hold.job_id} cannot be part of job.unit(transaction=): they would lock "
            "other jobs until your commit. Do them before or after the block."
        )
    if any(isinstance(change, NewJob) and change.replaces is not None for change in unit.changes):
        raise IllegalMoveError(
            f"on_duplicate='replace' cannot be part of job.unit(transaction=) of job {hold.job_id}: it would lock the "
            "job that is replaced until your commit. Do it before or after the block."
        )
    if any(isinstance(change, CancelTimer) and change.job_id != hold.job_id for change in unit.changes):
        raise IllegalMoveError(
            f"cancel_timer() of another job than job {hold.job_id} cannot be part of job.unit(transaction=): it would "
            "lock that job until your commit. Do it before or after the block."
        )

    def work() -> tuple[int, Applied]:
        jobs_locked = jobs.lock(borrowed, [hold.job_id])
        check_fence(hold, jobs_locked.get(hold.job_id))
        applied = Applied(
            runtime, borrowed, unit.changes, noting=True, own=hold.job_id, bounded=hold.kind != "shutdown"
        )
        applied.lock()
        applied.have_read(_pass_fence(borrowed, hold, unit))
        applied.apply()
        return transaction_id(borrowed), applied

    number, applied = borrowed.apply(work)
    reach("unit:before-commit")
    return number, follow_commit_of(runtime, borrowed, applied.after_commit)


def is_applied(runtime: Runtime, hold: Hold) -> bool:
    """Tell whether the unit written into a transaction that has ended was committed."""
    return _is_next(hold, claims.outcome(runtime.connections, hold.job_id))


def was_applied(runtime: Runtime, hold: Hold) -> bool:
    """Tell whether a commit of ours was applied that an exception (a time limit) has interrupted.

    It may still be in progress without us: this waits for the job's lock. Raises LeaseLostError if the run is no longer
    current.
    """

    def work(executor: Transaction) -> Any:
        return jobs.lock(executor, [hold.job_id]).get(hold.job_id)

    return _is_next(hold, runtime.connections.transact("find-out", work))


def _is_next(hold: Hold, row: Any) -> bool:
    check_fence(hold, row, any_unit=True)
    return bool(row.unit_no == hold.unit_no + 1)


def _apply(runtime: Runtime, executor: Transaction, hold: Hold, unit: Unit) -> Applied:
    kept, hold.ports = hold.ports, {}  # one of them may be the reason why this try fails: the next reads them again
    bounded = hold.kind != "shutdown"
    applied = Applied(runtime, executor, unit.changes, own=hold.job_id, kept=kept, bounded=bounded)
    try:
        applied.lock([hold.job_id])
    except JobNotFoundError:
        check_fence(hold, applied.lock_set.rows.get(hold.job_id))  # the job of a zombie may have been deleted
        raise
    check_fence(hold, applied.lock_set.rows[hold.job_id])
    applied.have_read(_pass_fence(executor, hold, unit))
    applied.apply()
    if sum(map(len, kept.values())) <= KEPT_PORTS:
        hold.ports = kept
    return applied


def _pass_fence(executor: Transaction, hold: Hold, unit: Unit) -> Sequence[int]:
    """Consume what the unit has read, and return the ports with a limit among those that it has read."""
    passed = claims.fence(
        executor, hold.job_id, run_no=hold.run_no, unit_no=hold.unit_no, worker_id=hold.worker_id, read=unit.read
    )
    if passed is None:
        raise lease_lost(hold)
    _check_consumed(hold, unit, passed.consumed)
    limited: Sequence[int] = passed.limited
    return limited


def consume(executor: Transaction, hold: Hold, unit: Unit) -> Set[int]:
    """Remove the packets that a unit has read, and return the ports with a limit of which they were.

    Raises InputsMovedError if another reader was faster.
    """
    if not unit.read:
        return frozenset()
    consumed = packets.consume(executor, unit.read, job_id=hold.job_id, run_no=hold.run_no)
    _check_consumed(hold, unit, len(consumed))
    return room.limited(consumed)


def _check_consumed(hold: Hold, unit: Unit, count: int) -> None:
    if count != len(unit.read):
        raise InputsMovedError(f"Packets read by run {hold.run_no} of job {hold.job_id} were consumed elsewhere.")
