"""The life of a run: claim it, commit its units; `endings` ends it. Every step may be repeated after a lost answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from ...model.changes import Adopt, CancelTimer, Change, Disown, Log, NewJob, RememberInputs, Terminate
from ...model.crash_points import reach
from ...model.errors import IllegalMoveError, LeaseLostError, StoreUnavailableError
from ...model.status import Status
from ...store import advisory, claims, jobs, packets, room
from ...store import queues as queue_rows
from ...store.borrowed.borrowed import Borrowed
from ...store.claims import Owed, Try
from ...store.errors import OutcomeUnknown
from ...store.outbox import doorbells
from ...store.statement import Transaction
from ..changes.follow_up import follow_commit_of, follow_up
from ..changes.unit_of_work import Applied
from ..gates import queues
from ..hold import BeginsAgainError, Hold, check_fence, lease_lost, repeat_until_known
from ..lock_set import KeptPorts
from ..runtime import PAUSE_S, LocalRuntime, Runtime
from . import measuring

KEPT_PORTS = 1000
"""The most rows of ports that a run keeps for its next units; with more it starts again."""


class InputsMovedError(BeginsAgainError):
    """Packets that this unit has read are gone."""


NO_END = (LeaseLostError, BeginsAgainError, StoreUnavailableError)
"""Errors after which a run makes no end: it belongs to another worker, or it begins again."""


@dataclass(slots=True)
class Unit:
    """The content of one commit of a run: the packets read, and the asks and writes, in order."""

    changes: list[Change] = field(default_factory=list)
    read: list[tuple[int, int]] = field(default_factory=list)
    took: bool = False
    replays: bool = False
    """Whether it is the last unit of a run with steps: if the job was asked meanwhile, it is discarded and done again.

    Otherwise the next run, of another asking, would begin without the steps, and do them again.
    """
    thrown_away: bool = False
    """Whether it was discarded for that reason."""
    serial: int = field(default_factory=itertools.count().__next__)
    """Distinguishes a snapshot of this unit from a snapshot of a unit committed since."""

    @property
    def empty(self) -> bool:
        """Whether a commit would only prove that the run is still current."""
        return not self.changes and not self.read

    @property
    def has_inputs(self) -> bool:
        """Whether the unit has read anything: packets, or the defaults of a turn that will not come again."""
        return bool(self.read) or any(isinstance(change, RememberInputs) for change in self.changes)

    def surviving(self, job_id: int) -> list[Change]:
        """Return the part of a unit that is kept after its run has raised: its own job's termination and history."""
        return [change for change in self.changes if isinstance(change, Terminate | Log) and change.job_id == job_id]

    def copy(self) -> Unit:
        """Return a snapshot to return to."""
        return Unit(list(self.changes), list(self.read), self.took, serial=self.serial)


LOOK_MOST = 500
"""The most children that a claim reads. A body may need no children, so with more the claim reads none."""


def claim(  # noqa: PLR0913 - what the delivery names, and who begins it
    runtime: Runtime,
    job_id: int,
    *,
    task: str,
    for_run: int,
    worker_id: int,
    queue: str | None = None,
    tasks: Callable[[], Collection[str]] = tuple,
    passes: bool = False,
) -> Hold | None:
    """Begin the run that this delivery announces; None if the delivery is stale: then it must be dropped.

    The job's row says which `task` it runs: a delivery with another task begins nothing. `queue` is the queue of the
    delivery, if known. If the queue is managed, the delivery is a permit: it begins the best run that is owed there,
    for `task` or another of `tasks`, if the gate is open. `passes`: the gate is ignored, because the body will not be
    called, or not by a worker.

    A claim whose answer was lost is repeated. Otherwise the job could be held by a worker that does not run it. If the
    process dies after the commit, the worker's death or its own reconciliation gives the job back.

    The hold has the job's children at the time of the claim: if the body can see a child's end, no further run is owed
    for that end. If there are more than `LOOK_MOST` children, a body that asks for them reads them later: it may see an
    end for which a further run is owed, but it misses none.
    """
    asked_at, is_managed, hold = time.monotonic(), False, None
    of_queue = partial(_claim_by_permit, runtime, job_id=job_id, task=task, tasks=tasks, worker_id=worker_id)
    if queue is not None and not passes and queues.is_known(runtime, queue):
        is_managed, hold = of_queue(queue)
    if not is_managed:
        hold = _claim_by_name(runtime, job_id, task=task, for_run=for_run, worker_id=worker_id, passes=passes)
        if hold is None and not passes:
            queue = queue or queue_rows.queue_of(runtime.connections, job_id)
            if queue is not None and queue_rows.is_managed(runtime.connections, queue):
                _, hold = of_queue(queue)
    if hold is not None:
        runtime.audience.learn(hold.row, asked_at)
        measuring.begun(runtime, hold)
    return hold


def begin_locked(executor: Transaction, job_ids: Iterable[int], *, worker_id: int) -> list[Hold]:
    """Begin the runs that these jobs are owed now, in the transaction that has locked them; gates are ignored."""
    holds = []
    for due in doorbells.waiting(executor, job_ids):
        owed = Owed(due.job_id, due.for_run, due.task)
        found = claims.claim(executor, owed, worker_id=worker_id, most=0, how=Try.AT_ONCE, passes=True)
        holds += [held(found, worker_id)] if found else []
    return holds


def _claim_by_name(
    runtime: Runtime, job_id: int, *, task: str, for_run: int, worker_id: int, passes: bool
) -> Hold | None:
    begin: Callable[..., Sequence[Any]] = partial(
        claims.claim,
        owed=Owed(job_id, for_run, task),
        worker_id=worker_id,
        most=LOOK_MOST,
        passes=passes,
        schema=runtime.audience.to_ask,
    )
    uncertain, how = False, Try.AT_ONCE
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            found = runtime.connections.timed("claim", partial(begin, how=how), single=True)
            if found or how == (Try.AGAIN if uncertain else Try.LEAVING):
                break
            how = Try(how + 1)
        except StoreUnavailableError as error:
            uncertain = uncertain or isinstance(error, OutcomeUnknown)
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
    return held(found, worker_id) if found else None


def _claim_by_permit(
    runtime: Runtime, queue: str, *, job_id: int, task: str, tasks: Callable[[], Collection[str]], worker_id: int
) -> tuple[bool, Hold | None]:
    """Begin a run by a permit; returns whether the queue is managed, and the run.

    If an answer was lost, the worker may hold a run that it does not execute: it gives that run back (`held_runs.py`).
    """
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            claimed = queues.claim(
                runtime, queue, job_id=job_id, task=task, tasks=tasks(), worker_id=worker_id, most=LOOK_MOST
            )
            break
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
    if claimed is None:
        return False, None
    found, frees_slot = claimed
    if not found:
        return True, None
    hold = held(found, worker_id)
    hold.slot_in = queue if frees_slot else None
    return True, hold


def held(found: Sequence[Any], worker_id: int, *, in_page: bool = False) -> Hold:
    """Return the hold of a run that was claimed."""
    # Asks may remain for a further run: then the job is queued while this run is in progress.
    row = found[0] if found[0].status == Status.TERMINATING else found[0]._replace(status=str(Status.RUNNING))
    reads_them = row.run_kind == "run" and not row.has_many_children
    children = sorted(found[1:], key=attrgetter("id")) if reads_them else None
    return Hold(
        row.id,
        row.run_no,
        worker_id,
        row.run_kind,
        started=row.started,
        row=row,
        children=children,
        began_at=time.monotonic(),
        in_page=in_page,
    )


def commit(runtime: Runtime, hold: Hold, unit: Unit, name: str = "checkpoint") -> None:
    """Apply a unit of a run in one commit, all or nothing; `name` is the transaction's name.

    Raises LeaseLostError if the run is no longer the job's current run, InputsMovedError if another reader consumed
    packets that it had read.
    """

    def work(executor: Transaction) -> Applied:
        kept, hold.ports = hold.ports, {}  # one of these rows may be why this try fails: the next reads them again
        applied = _apply(runtime, executor, hold, unit, kept=kept)
        if sum(map(len, kept.values())) <= KEPT_PORTS:
            hold.ports = kept
        return applied

    applied = repeat_until_known(runtime, hold, name, work)
    hold.unit_no += 1
    hold.started = True
    if applied is not None:
        follow_up(runtime, applied.after_commit)


def commit_with(runtime: Runtime, hold: Hold, unit: Unit, borrowed: Borrowed) -> tuple[int, Callable[[], None]]:
    """Write a unit of a run into the caller's transaction; the caller commits.

    Returns the transaction's number, and a function with the work after its commit, in case we do not learn of the
    commit.

    The transaction contains the lock, the fence and all buffered changes; after an error it contains nothing. Wakes of
    other jobs are only noted in it: the caller's transaction locks no job but the run's own.
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
        applied = _apply(runtime, borrowed, hold, unit, kept={}, noting=True)
        return advisory.mark_job(borrowed, hold.job_id), applied

    number, applied = borrowed.apply(work)
    reach("unit:before-commit")
    return number, follow_commit_of(runtime, borrowed, applied.after_commit)


def is_applied(runtime: Runtime, hold: Hold) -> bool:
    """Tell whether a unit was committed that was written into a transaction which has ended."""
    return _is_committed(hold, hold.unit_no, claims.outcome(runtime.connections, hold.job_id))


def was_applied(runtime: Runtime, hold: Hold, number: int) -> bool:
    """Tell whether our commit of the unit of this number, which a time limit or an outage has interrupted, was applied.

    It may still be in progress without us: this waits for the job's lock. Raises LeaseLostError if the run is no longer
    current.
    """
    locked = runtime.connections.transact("find-out", partial(jobs.lock, ids=[hold.job_id]))
    return _is_committed(hold, number, locked.get(hold.job_id))


def _is_committed(hold: Hold, number: int, row: Any) -> bool:
    check_fence(hold, row, any_unit=True)
    return bool(row.unit_no == number + 1)


def _apply(
    runtime: LocalRuntime, executor: Transaction, hold: Hold, unit: Unit, *, kept: KeptPorts, noting: bool = False
) -> Applied:
    applied = Applied(runtime, executor, unit.changes, noting=noting, hold=hold, kept=kept)
    applied.lock()
    applied.mailboxes.have_read(_pass_fence(executor, hold, unit))
    applied.apply()
    return applied


def _pass_fence(executor: Transaction, hold: Hold, unit: Unit) -> Sequence[int]:
    """Consume the packets that the unit has read, and return the ports among theirs that have a limit."""
    passed = claims.fence(
        executor, hold.job_id, run_no=hold.run_no, unit_no=hold.unit_no, worker_id=hold.worker_id, read=unit.read
    )
    if passed is None:
        raise lease_lost(hold)
    _check_consumed(hold, unit, passed.consumed)
    limited: Sequence[int] = passed.limited
    return limited


def consume(executor: Transaction, hold: Hold, unit: Unit) -> Set[int]:
    """Remove the packets that a unit has read, and return the ports among theirs that have a limit.

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
