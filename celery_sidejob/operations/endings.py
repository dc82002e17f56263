"""The end of a run: its last unit, the job's status, the asking's outcome, the parent's wake, in one commit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..model.changes import Change, NewJob, Terminate
from ..model.errors import JobNotFoundError
from ..model.messages import FORMAT, Outcome
from ..model.status import ASKABLE, Status
from ..store import askings, asks, claims, dead, jobs, messages, packets
from ..store.errors import Moved
from ..store.statement import Executor
from .hold import Hold, check_fence, lease_lost, repeat_until_known
from .noted_asks import apply_noted_asks
from .runs import Unit, consume
from .runtime import Aftermath, Move, Runtime
from .unit_of_work import Applied


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended. `outcome` is the status it would rest in; `result` is the asking's result as JSON text."""

    outcome: Status
    result: str = "null"
    error: str | None = None
    traceback: str | None = None
    retry_in_s: float | None = None
    reason: str = "failed"
    asked: Sequence[Change] = ()
    """What is applied of the unit of a run that raised: the termination of its own job."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of the job at the end of its run."""

    status: str
    retries: int = 0


def end(runtime: Runtime, hold: Hold, unit: Unit | None, ending: Ending, *, from_outside: bool = False) -> Ended:
    """End a run: apply its last unit (None when it raised), its status, the asking's outcome, the parent's wake.

    With `from_outside` the worker ends a run whose process it has stopped, whatever units it committed before.
    Raises LeaseLostError if the run was no longer current: then nothing of this was applied.
    """

    if unit is not None and not from_outside and (ended := _end_quietly(runtime, hold, unit, ending)) is not None:
        return ended
    known: Mapping[int, int | None] | None = {hold.job_id: hold.row.parent_id}

    def work(executor: Executor) -> tuple[Applied, Ended]:
        nonlocal known
        parents, known = known or jobs.parents(executor, [hold.job_id]), None  # if it moved, it is read again
        return _end(runtime, executor, hold, unit, ending, from_outside, parents)

    done = repeat_until_known(runtime, hold, "end", work, ends=True)
    if done is None:
        return _ended_before(runtime, hold)
    applied, ended = done
    runtime.follow(applied.aftermath)
    apply_noted_asks(runtime, applied.aftermath.noted)
    return ended


def _end_quietly(runtime: Runtime, hold: Hold, unit: Unit, ending: Ending) -> Ended | None:
    """End a run that leaves nothing to be applied, in one statement that needs no lock before it.

    None if there is something to apply after all: the ordinary end then judges it under the lock.
    """
    row = hold.row
    if not unit.empty or unit.took or ending.retry_in_s is not None or hold.kind != "run":
        return None
    if row.parent_id is not None or row.options is not None or ending.outcome == Status.FAILED:
        return None
    wanted = runtime.results.wanted(row.task, None)

    def work(executor: Executor) -> tuple[Any]:
        return (_write_end(executor, hold, unit, ending, unwanted=not wanted, quiet=True),)

    done = repeat_until_known(runtime, hold, "end", work, ends=True, single=True)
    if done is None:
        return _ended_before(runtime, hold)
    if done[0] is None:
        return None
    aftermath = Aftermath(moves=[_move(hold, Status.RUNNING, done[0].status)])
    if done[0].task_id is not None and wanted:
        aftermath.outcomes.append(_outcome(done[0].task_id, row, ending.outcome, ending.result))
    runtime.follow(aftermath)
    return Ended(done[0].status)


def _ended_before(runtime: Runtime, hold: Hold) -> Ended:
    """Return what a run has become whose end was applied, but whose answer was lost: the sweeper does what follows."""
    row = claims.outcome(runtime.connections, hold.job_id)
    return Ended(row.status if row is not None else Status.TERMINATED)


def _end(
    runtime: Runtime, executor: Executor, hold: Hold, unit: Unit | None, ending: Ending, from_outside: bool,
    parents: Mapping[int, int | None],
) -> tuple[Applied, Ended]:  # fmt: skip
    changes = list(unit.changes if unit is not None else ending.asked)
    handed_down = hold.kind == "shutdown" and _hand_down(executor, hold, changes)
    applied = Applied(runtime, executor, changes, own=hold.job_id)
    try:
        applied.lock([hold.job_id], parents=parents)
    except JobNotFoundError:
        check_fence(hold, applied.touched.rows.get(hold.job_id), any_unit=from_outside)
        if handed_down:
            raise Moved("a child was deleted before it was locked") from None
        raise
    job = applied.touched.rows[hold.job_id]
    check_fence(hold, job, any_unit=from_outside)
    if hold.kind == "shutdown" and job.terminate_tree and not handed_down:
        raise Moved("the shutdown became one of the whole tree")
    if unit is not None:
        consume(executor, hold, unit)
    applied.apply()
    if ending.outcome == Status.FAILED:
        applied.wakes.apply_due(hold.job_id)  # what is noted and committed by now came before the failure
    unwanted = not runtime.results.wanted(job.task, None)
    row = _write_end(executor, hold, unit, ending, unwanted=unwanted, any_unit=from_outside)
    if row is None:
        raise lease_lost(hold)
    if unit is None or unit.took:
        _free_taken(executor, hold, applied.aftermath)
    _settle_message(runtime, executor, hold, job, row, ending, applied.aftermath)
    retry = ending.retry_in_s is not None
    _announce(hold, row.status, ending, retry, applied)
    if not retry and row.parent_id is not None and applied.touched.statuses.get(row.parent_id) in ASKABLE:
        applied.wakes.ask([row.parent_id], nudge=True)
    return applied, Ended(row.status, row.retries)


def _write_end(
    executor: Executor, hold: Hold, unit: Unit | None, ending: Ending, *, unwanted: bool, any_unit: bool = False,
    quiet: bool = False,
) -> Any | None:  # fmt: skip
    return claims.end(
        executor,
        hold.job_id,
        run_no=hold.run_no,
        unit_no=None if any_unit else hold.unit_no,
        worker_id=hold.worker_id,
        outcome=ending.outcome,
        result=ending.result,
        unwanted=unwanted,
        applied=unit is not None,
        retry=ending.retry_in_s is not None,
        error=ending.error,
        seen=hold.seen_wakes if unit is not None else None,
        quiet=quiet,
    )


def _hand_down(executor: Executor, hold: Hold, changes: list[Change]) -> bool:
    """Have the children of a job that was terminated recursively terminated too, also those that came since."""
    row = claims.read_claimed(executor, hold.job_id)
    if row is None or not row.terminate_tree:
        return False
    below = jobs.child_ids(executor, hold.job_id)
    below += [change.id for change in changes if isinstance(change, NewJob) and change.parent_id == hold.job_id]
    changes += [Terminate(child, tree=True) for child in below]
    return True


def _free_taken(executor: Executor, hold: Hold, aftermath: Aftermath) -> None:
    """Ask the natural readers of packets that the run took and gives back: they may have found nothing meanwhile."""
    readers = packets.release(executor, hold.job_id, hold.run_no)
    if readers:
        asks.note(executor, readers, "run")
        aftermath.noted += readers


def _settle_message(
    runtime: Runtime, executor: Executor, hold: Hold, job: Any, row: Any, ending: Ending, aftermath: Aftermath
) -> None:
    """Leave the message, the asking and the dead set as the job's new status wants them."""
    retry = ending.retry_in_s is not None
    closed = row.task_id
    if closed is not None:
        _follow_closing(runtime, executor, row, _outcome(closed, hold.row, ending.outcome, ending.result), aftermath)
    look_after_s = runtime.settings.lost_after
    next_run = hold.run_no + 1
    if row.status == Status.TERMINATING or (row.status == Status.QUEUED and row.asked_again and not retry):
        task_id = None
        if closed:
            task_id = askings.open_next(executor, job.id) if row.status == Status.QUEUED else str(uuid.uuid4())
        elif row.status == Status.QUEUED and hold.kind == "shutdown":
            task_id = askings.open_next(executor, job.id)
        armed = claims.rearm(executor, job.id, for_run=next_run, task_id=task_id, look_after_s=look_after_s)
        aftermath.ring(job, armed)
    elif retry and row.status == Status.QUEUED:
        armed = claims.rearm(
            executor, job.id, for_run=next_run, wait_s=ending.retry_in_s or 0.0, look_after_s=look_after_s
        )
        if not ending.retry_in_s:  # otherwise the sweeper publishes it when its backoff is over
            aftermath.ring(job, armed)
    if row.status == Status.TERMINATED:
        asks.drop_runs(executor, job.id)
    if row.status == Status.FAILED:
        bury(executor, job, reason=ending.reason, error=ending.error, traceback=ending.traceback,
             task_id=closed, retries=hold.row.retries, aftermath=aftermath)  # fmt: skip


def _announce(hold: Hold, status: str, ending: Ending, retry: bool, applied: Applied) -> None:
    """Tell the outcome, then what the job is now: failed, then queued, if it was asked for meanwhile."""
    before = applied.touched.statuses[hold.job_id]
    outcome = Status.TERMINATED if hold.kind == "shutdown" else ending.outcome
    moves = applied.aftermath.moves
    if status == Status.TERMINATING:
        steps: list[str] = []
    elif status == outcome or retry:
        steps = [status]
    else:
        steps = [outcome, status]
    for step in steps:
        moves.append(_move(hold, before, step))
        before = step
    applied.touched.statuses[hold.job_id] = status


def _move(hold: Hold, before: str, after: str) -> Move:
    return Move(hold.job_id, hold.row.task, before, after, hold.run_no, hold.row.task_id)


def close_asking(
    runtime: Runtime, executor: Executor, job: Any, *, outcome: Status, result: str, aftermath: Aftermath
) -> str | None:
    """Close the job's open asking, if it has one, together with the rows of its continuations."""
    unwanted = not runtime.results.wanted(job.task, None)
    row = askings.close(executor, job.id, outcome=outcome, result=result, unwanted=unwanted)
    if row is None:
        return None
    (shown,) = jobs.find(executor, [job.id])  # the locked row has no arguments, which a backend may want to keep
    _follow_closing(runtime, executor, row, _outcome(row.task_id, shown, outcome, result), aftermath)
    task_id: str = row.task_id
    return task_id


def _follow_closing(runtime: Runtime, executor: Executor, row: Any, ended: Outcome, aftermath: Aftermath) -> None:
    """Write the continuations of an asking that was just closed, and have its result brought to the backend."""
    options = json.loads(row.options) if row.options else None
    ended = replace(ended, options=options)
    for continuation in runtime.results.continuations(ended):
        messages.add_continuation(
            executor, key=continuation.key, queue=continuation.queue, publication=continuation.publication,
            look_after_s=runtime.settings.lost_after,
        )  # fmt: skip
        aftermath.continuations.append(continuation)
    if runtime.results.wanted(ended.task, options):
        aftermath.outcomes.append(ended)
    elif options:
        askings.mark_stored(executor, [row.task_id])


def _outcome(task_id: str, row: Any, outcome: Status, result: str) -> Outcome:
    """Return the outcome of an asking without options; `row` is the job's, with its arguments."""
    return Outcome(task_id, row.id, row.task, row.queue, outcome, result, None, row.args, row.kwargs)


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
    shown = storable(message)
    return json.dumps({"v": FORMAT, "type": kind, "module": module, "message": shown, "traceback": traceback})


def storable(text: str) -> str:
    """Return an error's text without NUL characters, which Postgres cannot store."""
    return text.replace("\x00", "\ufffd")
