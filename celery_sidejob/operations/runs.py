"""The life of a run: claim it, commit its units, end it. Every step may be repeated after a lost answer."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..model.changes import Adopt, Change, Disown, Terminate
from ..model.errors import IllegalMoveError, JobNotFoundError, LeaseLostError, StoreUnavailableError
from ..model.messages import FORMAT, Outcome
from ..model.status import ASKABLE, Status
from ..store import askings, asks, claims, dead, jobs, messages, packets
from ..store.borrowed import Borrowed, transaction_id
from ..store.connection import Moved, OutcomeUnknown
from ..store.statement import Executor
from .runtime import Aftermath, Runtime, bell_of
from .unit_of_work import Applied, apply_noted_asks

T = TypeVar("T")

PAUSE_S = 0.2
"""Between two tries to reach a store that went away."""


class InputsMovedError(Exception):
    """Packets this unit has read are no longer there: the unit is refused, and the run must begin again."""


@dataclass(slots=True)
class Hold:
    """A claimed run. `(job_id, run_no, worker_id)` names it, `unit_no` counts its committed units."""

    job_id: int
    run_no: int
    worker_id: int
    kind: str
    unit_no: int = 0
    started: bool = False
    row: Any = None
    """The job and its asking as they were claimed."""
    seen_wakes: int | None = None
    """The asks that had come when the body began, if since the claim there were only nudges."""


@dataclass(slots=True)
class Unit:
    """What one commit of a run applies: what was read, and what was asked and written, in order."""

    changes: list[Change] = field(default_factory=list)
    read: list[tuple[int, int]] = field(default_factory=list)
    took: bool = False
    serial: int = field(default_factory=itertools.count().__next__)
    """Tells a snapshot of this unit from one of a unit that was committed since."""

    @property
    def empty(self) -> bool:
        """Whether a commit would only prove that the run is still the current one."""
        return not self.changes and not self.read

    def copy(self) -> Unit:
        """Return a snapshot to go back to."""
        return Unit(list(self.changes), list(self.read), self.took, self.serial)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended. `outcome` is the status it would rest in; `result` is the asking's result as JSON text."""

    outcome: Status
    result: str = "null"
    error: str | None = None
    traceback: str | None = None
    retry_in_s: float | None = None
    reason: str = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of the job at the end of its run."""

    status: str
    retries: int = 0


def claim(runtime: Runtime, job_id: int, *, for_run: int, worker_id: int) -> Hold | None:
    """Begin the run this delivery announces; None if it is stale: it must then be forgotten.

    A claim whose answer was lost is recognised as our own, or the job would be held by nobody who runs it. If the
    process dies after the commit, the worker's death or its own reconciliation gives the job back.
    """

    def work(executor: Executor) -> Any:
        return claims.claim(executor, job_id, for_run=for_run, worker_id=worker_id)

    uncertain = False
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            found = runtime.connections.transact("claim", work, single=True)
            break
        except StoreUnavailableError as error:
            uncertain = uncertain or isinstance(error, OutcomeUnknown)
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
    if found is None and uncertain:
        row = claims.outcome(runtime.connections, job_id)
        if row is not None and (row.run_no, row.worker_id, row.unit_no) == (for_run, worker_id, 0):
            found = claims.read_claimed(runtime.connections, job_id)
    if found is None:
        return None
    return Hold(job_id, found.run_no, worker_id, found.run_kind, started=found.started, row=found)


def look(runtime: Runtime, hold: Hold) -> list[Any]:
    """Read the job's children as they are when its run begins, and note which asks had come by then.

    It is one statement, before any code of the user runs. Nudges among the asks since the claim need no run of their
    own: what they are for is seen by this run, as if the claim had been made now. A `run()` among them keeps its run.
    """
    rows = list(claims.look(runtime.connections, hold.job_id))
    if rows and hold.row is not None:
        asked, nudged = rows[0].wakes - hold.row.wakes_taken, rows[0].nudges - hold.row.nudges
        hold.seen_wakes = rows[0].wakes if asked == nudged else None
    return [row for row in rows if row.id is not None]


def commit(runtime: Runtime, hold: Hold, unit: Unit) -> None:
    """Apply a unit of a run in one commit, or nothing of it.

    Raises LeaseLostError if the run is no longer the job's current one, InputsMovedError if another reader consumed
    what it had read.
    """

    def work(executor: Executor) -> Applied:
        return _apply(runtime, executor, hold, unit)

    applied = _repeatable(runtime, hold, "checkpoint", work)
    hold.unit_no += 1
    hold.started = True
    if applied is not None:
        runtime.follow(applied.aftermath)
        apply_noted_asks(runtime, applied.aftermath.noted)


def commit_with(runtime: Runtime, hold: Hold, unit: Unit, borrowed: Borrowed) -> tuple[int, Callable[[], None]]:
    """Write a unit of a run into the caller's transaction; the caller commits.

    Returns the transaction's number, and what must follow its commit where nobody tells us of that.

    Lock, fence and everything buffered are in it, or after an error nothing. Wakes of other jobs are only noted there,
    so that the caller's transaction locks no job but the run's own.
    """
    if any(isinstance(change, Adopt | Disown) for change in unit.changes):
        raise IllegalMoveError(
            f"adopt() and disown() of job {hold.job_id} cannot be part of job.unit(transaction=): they would lock "
            "other jobs until your commit. Do them before or after the block."
        )
    with borrowed.atomic():
        jobs_locked = jobs.lock(borrowed, [hold.job_id])
        _check_fence(hold, jobs_locked.get(hold.job_id))
        applied = Applied(runtime, borrowed, unit.changes, noting=True, own=hold.job_id)
        applied.lock()
        _consume(borrowed, hold, unit)
        applied.apply()
        if not claims.fence(borrowed, hold.job_id, run_no=hold.run_no, unit_no=hold.unit_no, worker_id=hold.worker_id):
            raise _lease_lost(hold)
        number = transaction_id(borrowed)
    follow = runtime.follow_commit_of(borrowed, applied.aftermath, lambda job_id: apply_noted_asks(runtime, [job_id]))
    return number, follow


def is_applied(runtime: Runtime, hold: Hold) -> bool:
    """Tell whether the unit written into a transaction that is over was committed."""
    row = claims.outcome(runtime.connections, hold.job_id)
    if row is None or (row.run_no, row.worker_id) != (hold.run_no, hold.worker_id) or row.unit_no is None:
        raise _lease_lost(hold)
    return bool(row.unit_no == hold.unit_no + 1)


def end(runtime: Runtime, hold: Hold, unit: Unit | None, ending: Ending, *, from_outside: bool = False) -> Ended:
    """End a run: apply its last unit (None when it raised), its status, the asking's outcome, the parent's wake.

    With `from_outside` the worker ends a run whose process it has stopped, whatever units it committed before.
    Raises LeaseLostError if the run was no longer current: then nothing of this was applied.
    """

    def work(executor: Executor) -> tuple[Applied, Ended]:
        return _end(runtime, executor, hold, unit, ending, from_outside)

    done = _repeatable(runtime, hold, "end", work, ends=True)
    if done is None:
        row = claims.outcome(runtime.connections, hold.job_id)
        return Ended(row.status if row is not None else Status.TERMINATED)
    applied, ended = done
    runtime.follow(applied.aftermath)
    apply_noted_asks(runtime, applied.aftermath.noted)
    return ended


def _repeatable(
    runtime: Runtime, hold: Hold, name: str, work: Callable[[Executor], T], *, ends: bool = False
) -> T | None:
    """Run a fenced transaction until it is known to be applied; None if it was, and its answer was lost."""
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            return runtime.connections.transact(name, work)
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
        try:
            row = claims.outcome(runtime.connections, hold.job_id)
        except StoreUnavailableError:
            continue
        if row is None:
            raise _lease_lost(hold)
        if ends and row.ended_run == hold.run_no:
            return None
        if (row.run_no, row.worker_id) != (hold.run_no, hold.worker_id):
            raise _lease_lost(hold)
        if not ends and row.unit_no == hold.unit_no + 1:
            return None


def _apply(runtime: Runtime, executor: Executor, hold: Hold, unit: Unit) -> Applied:
    applied = Applied(runtime, executor, unit.changes, own=hold.job_id)
    applied.lock([hold.job_id])
    _check_fence(hold, applied.rows[hold.job_id])
    _consume(executor, hold, unit)
    applied.apply()
    if not claims.fence(executor, hold.job_id, run_no=hold.run_no, unit_no=hold.unit_no, worker_id=hold.worker_id):
        raise _lease_lost(hold)
    return applied


def _end(
    runtime: Runtime, executor: Executor, hold: Hold, unit: Unit | None, ending: Ending, from_outside: bool
) -> tuple[Applied, Ended]:
    changes = list(unit.changes) if unit is not None else []
    handed_down = hold.kind == "shutdown" and _hand_down(executor, hold, changes)
    applied = Applied(runtime, executor, changes, own=hold.job_id)
    try:
        applied.lock([hold.job_id], with_parents=True)
    except JobNotFoundError:
        if handed_down:
            raise Moved("a child was deleted before it was locked") from None
        raise
    job = applied.rows[hold.job_id]
    _check_fence(hold, job, any_unit=from_outside)
    if hold.kind == "shutdown" and job.terminate_tree and not handed_down:
        raise Moved("the shutdown became one of the whole tree")
    if unit is not None:
        _consume(executor, hold, unit)
    applied.apply()
    retry = ending.retry_in_s is not None
    row = claims.end(
        executor,
        hold.job_id,
        run_no=hold.run_no,
        unit_no=None if from_outside else hold.unit_no,
        worker_id=hold.worker_id,
        outcome=ending.outcome,
        applied=unit is not None,
        retry=retry,
        error=ending.error,
        seen=hold.seen_wakes if unit is not None else None,
    )
    if row is None:
        raise _lease_lost(hold)
    if unit is None or unit.took:
        _free_taken(executor, hold, applied.aftermath)
    _settle_message(runtime, executor, hold, job, row, ending, applied.aftermath)
    _announce(hold, job, row.status, ending, retry, applied)
    if not retry and row.parent_id is not None and applied.statuses.get(row.parent_id) in ASKABLE:
        applied.ask([row.parent_id], nudge=True)
    return applied, Ended(row.status, row.retries)


def _hand_down(executor: Executor, hold: Hold, changes: list[Change]) -> bool:
    """Have the children of a job that was terminated recursively terminated too, also those that came since."""
    row = claims.read_claimed(executor, hold.job_id)
    if row is None or not row.terminate_tree:
        return False
    changes += [Terminate(child.id, tree=True) for child in jobs.children(executor, hold.job_id)]
    return True


def _settle_message(
    runtime: Runtime, executor: Executor, hold: Hold, job: Any, row: Any, ending: Ending, aftermath: Aftermath
) -> None:
    """Leave the message, the asking and the dead set as the job's new status wants them."""
    retry = ending.retry_in_s is not None
    closed = None
    if ending.outcome in (Status.COMPLETED, Status.FAILED, Status.TERMINATED) and not (
        retry and row.status != Status.TERMINATING
    ):
        closed = close_asking(runtime, executor, job, outcome=ending.outcome, result=ending.result, aftermath=aftermath)
    look_after_s = runtime.settings.lost_after
    next_run = hold.run_no + 1
    if row.status == Status.TERMINATING or (row.status == Status.QUEUED and row.asked_again and not retry):
        task_id = None
        if closed:
            task_id = askings.open_next(executor, job.id) if row.status == Status.QUEUED else str(uuid.uuid4())
        elif row.status == Status.QUEUED and hold.kind == "shutdown":
            task_id = askings.open_next(executor, job.id)
        armed = claims.rearm(executor, job.id, for_run=next_run, task_id=task_id, look_after_s=look_after_s)
        aftermath.doorbells.append(bell_of(job, armed))
    elif retry and row.status == Status.QUEUED:
        armed = claims.rearm(
            executor, job.id, for_run=next_run, wait_s=ending.retry_in_s or 0.0, look_after_s=look_after_s
        )
        if not ending.retry_in_s:  # otherwise the sweeper publishes it when its backoff is over
            aftermath.doorbells.append(bell_of(job, armed))
    else:
        claims.disarm(executor, job.id)
    if row.status == Status.FAILED:
        bury(executor, job, reason=ending.reason, error=ending.error, traceback=ending.traceback,
             task_id=closed, retries=row.retries, aftermath=aftermath)  # fmt: skip


def close_asking(
    runtime: Runtime, executor: Executor, job: Any, *, outcome: Status, result: str, aftermath: Aftermath
) -> str | None:
    """Close the job's open asking, if it has one, together with the rows of its continuations."""
    unwanted = not runtime.results.wanted(job.task, None)
    row = askings.close(executor, job.id, outcome=outcome, result=result, unwanted=unwanted)
    if row is None:
        return None
    task_id: str = row.task_id
    options = json.loads(row.options) if row.options else None
    ended = Outcome(task_id, job.id, job.task, job.queue, outcome, result, options)
    for continuation in runtime.results.continuations(ended):
        messages.add_continuation(
            executor, key=continuation.key, queue=continuation.queue, publication=continuation.publication,
            look_after_s=runtime.settings.lost_after,
        )  # fmt: skip
        aftermath.continuations.append(continuation)
    if runtime.results.wanted(job.task, options):
        aftermath.outcomes.append(ended)
    elif options:
        askings.mark_stored(executor, [task_id])
    return task_id


def bury(
    executor: Executor, job: Any, *, reason: str, error: str | None, traceback: str | None, task_id: str | None,
    retries: int, aftermath: Aftermath, wake_pending: bool = False,
) -> None:  # fmt: skip
    """Enter a job that rests as failed in the dead set."""
    shown = json.loads(error) if error else {}
    entry = dead.bury(
        executor, job.id, task_id=task_id, reason=reason, retries=retries, traceback=traceback,
        error=f"{shown.get('type', '')}: {shown.get('message', '')}", wake_pending=wake_pending,
    )  # fmt: skip
    aftermath.calls.append(lambda observer: observer.buried(entry, job.id, job.task, reason))


def error_json(kind: str, message: str, module: str, traceback: str | None = None) -> str:
    """Return how an error is kept in rows."""
    text = message.replace("\x00", "\ufffd")
    return json.dumps({"v": FORMAT, "type": kind, "module": module, "message": text, "traceback": traceback})


def _free_taken(executor: Executor, hold: Hold, aftermath: Aftermath) -> None:
    """Ask the natural readers of packets that the run took and gives back: they may have found nothing meanwhile."""
    readers = packets.release(executor, hold.job_id, hold.run_no)
    if readers:
        asks.note(executor, readers, "run")
        aftermath.noted += readers


def _announce(hold: Hold, job: Any, status: str, ending: Ending, retry: bool, applied: Applied) -> None:
    """Tell the outcome, then what the job is now: failed, then queued, if it was asked for meanwhile."""
    before = applied.statuses[hold.job_id]
    outcome = Status.TERMINATED if hold.kind == "shutdown" else ending.outcome
    moves = applied.aftermath.moves
    if status == Status.TERMINATING:
        steps: list[str] = []
    elif status == outcome or retry:
        steps = [status]
    else:
        steps = [outcome, status]
    for step in steps:
        moves.append((hold.job_id, job.task, before, step))
        before = step
    applied.statuses[hold.job_id] = status


def _consume(executor: Executor, hold: Hold, unit: Unit) -> None:
    if unit.read and packets.consume(executor, unit.read, job_id=hold.job_id, run_no=hold.run_no) != len(unit.read):
        raise InputsMovedError(f"Packets read by run {hold.run_no} of job {hold.job_id} were consumed elsewhere.")


def _check_fence(hold: Hold, row: Any, *, any_unit: bool = False) -> None:
    if row is None or (row.run_no, row.worker_id) != (hold.run_no, hold.worker_id):
        raise _lease_lost(hold)
    if row.unit_no != hold.unit_no and not any_unit:
        raise _lease_lost(hold)


def _lease_lost(hold: Hold) -> LeaseLostError:
    return LeaseLostError(
        f"Run {hold.run_no} of job {hold.job_id} is no longer its current run: the worker was taken for dead and the "
        "job runs elsewhere, or the job was deleted. Nothing of this unit was applied."
    )
