"""The end of a job's run: its last unit, the end and the parent's wake, in one commit.

Only `end_job_run` ends a run, called by the run, by the worker that stopped it, or by a rescue. So code that belongs to
every end goes into it. It knows the run, how it ended and the job's new status, in the transaction that ends the run. A
termination ends no run: it asks for a shutdown, which is a run and ends here. A deletion ends no run either: only jobs
at rest are deleted.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...model.changes import Change, NewJob, Stage, Terminate
from ...model.crash_points import reach
from ...model.durable import Death
from ...model.errors import FullPort
from ...model.events import JobBuried, RunFailed
from ...model.loss import Loss
from ...model.messages import FORMAT, Outcome
from ...model.names import storable
from ...model.protocols import Rider
from ...model.status import ASKABLE, RunEnd, Status
from ...store import asks, claims, dead, jobs, packets, ports, run_ends, trees
from ...store.errors import FAILURES, Moved
from ...store.outbox import arming, doorbells
from ...store.results import Ended, Kept
from ...store.statement import Transaction
from ..after_commit import AfterCommit, follow, result_of
from ..changes.dependencies import mark_ended
from ..changes.follow_up import follow_up, pass_on
from ..changes.mailboxes import add_ports, note_asks, wait_for_room
from ..changes.unit_of_work import Applied
from ..gates import capacity
from ..gates.queues import freed
from ..hold import Hold, lease_lost, repeat_until_known
from ..runtime import LocalRuntime, Runtime
from . import measuring
from .runs import Unit, consume

QUIET = (RunEnd.COMPLETED, RunEnd.SUSPENDED)
"""Ends that need no lock before them if there is nothing else to write."""
MOST_OF_MESSAGE = 200
"""The most characters of an error's message in the history."""

TAKEN = (RunEnd.LOST, RunEnd.GIVEN_BACK)
"""Ends that the run did not decide: the run was taken from its worker."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended; `result` is the asking's result as JSON text."""

    how: RunEnd
    result: str = "null"
    error: str | None = None
    traceback: str | None = None
    retry_in_s: float = 0.0
    reason: str = "failed"
    asked: Sequence[Change] = ()
    """The applied part of the unit of a run that raised: the termination of its own job."""
    gives_up: Status | None = None
    """The status in which the job rests because this run was one loss too many."""
    waits_for: Sequence[FullPort] = ()
    """Ports without room for this run's writes: the run begins again when there is room."""
    then: Stage | None = None
    """The next stage of the job, in the same asking, if this run completes."""
    loss: Loss | None = None
    """Why the run was lost; None if it was not."""
    takes: bool = False
    """Whether the next run is claimed by its process and takes its packets before it uses them.

    Another reader took packets that this run had read, or it is unknown whether this run had begun.
    """

    undone: bool = False
    """Whether it was claimed and has not begun: then it leaves no trace, and its message is valid again."""

    @property
    def outcome(self) -> Status | None:
        """The status in which the job would rest; None if it runs again."""
        if self.how in TAKEN:
            return self.gives_up
        return Status.FAILED if self.how == RunEnd.RETRIED else Status(self.how)


@dataclass(frozen=True, slots=True)
class Closing:
    """How an asking ends, if it does: whether its outcome is wanted, and what this commit writes of it elsewhere."""

    ended: Outcome
    wanted: bool
    riders: Sequence[Rider]
    keeps: Kept | None
    """The result, if the statement of the end can write all that the riders would."""


def end(runtime: Runtime, hold: Hold, unit: Unit | None, ending: Ending, *, from_outside: bool = False) -> str:
    """End a run and return its job's status: apply its last unit (None if the run raised), the end, the parent's wake.

    With `from_outside` the worker ends a run whose process it has stopped, whatever units the run committed before.
    Raises LeaseLostError if the run was no longer current: then nothing was applied. If the process dies before the
    commit, the run is rescued; if it dies after that, the sweeper does what follows.
    """
    ended = None
    if unit is not None and not from_outside:
        ended = _end_quietly(runtime, hold, unit, ending)
    if ended is None:
        ended = _end_under_lock(runtime, hold, unit, ending, from_outside=from_outside)
    if hold.row.waited_for_room:
        with suppress(*FAILURES):  # the sweeper does it then
            pass_on(runtime, hold.job_id)
    reach("end:before-freed")
    freed(runtime, hold.slot_in)
    capacity.ring(runtime, [hold.row.pool])
    return ended


def may_be_quiet(hold: Hold, unit: Unit, ending: Ending) -> bool:
    """Tell whether a run has nothing to write but its end, as far as the run knows."""
    if not unit.empty or unit.took or ending.then is not None or ending.how not in QUIET:
        return False
    return hold.row.parent_id is None and hold.row.options is None


def _end_under_lock(runtime: Runtime, hold: Hold, unit: Unit | None, ending: Ending, *, from_outside: bool) -> str:
    known: Mapping[int, int | None] | None = {hold.job_id: hold.row.parent_id}

    def work(executor: Transaction) -> tuple[Applied, str]:
        nonlocal known
        parents, known = known or jobs.parents(executor, [hold.job_id]), None  # read again after Moved
        changes = list(unit.changes if unit is not None else ending.asked)
        applied = _locked(runtime, executor, hold, changes, parents, any_unit=from_outside)
        return applied, _end(runtime, applied, hold, unit, ending, by_worker=from_outside)

    done = repeat_until_known(runtime, hold, "end", work, ends=True)
    if done is None:
        return _ended_before(runtime, hold)
    applied, status = done
    follow_up(runtime, applied.after_commit)
    return status


def _end_quietly(runtime: Runtime, hold: Hold, unit: Unit, ending: Ending) -> str | None:
    """End a run that has nothing to apply, in one statement that needs no lock before it.

    None if there is something to apply after all: then the ordinary end judges it under the lock.
    """
    if not may_be_quiet(hold, unit, ending):
        return None

    def work(executor: Transaction) -> tuple[Any, AfterCommit]:
        after_commit = AfterCommit()
        return end_job_run(runtime, executor, hold, unit, ending, after_commit, quiet=True), after_commit

    done = repeat_until_known(runtime, hold, "end", work, ends=True, single=True)
    if done is None:
        return _ended_before(runtime, hold)
    row, after_commit = done
    if row is None:
        return None
    announce(hold, Status.RUNNING, row, ending, after_commit)
    follow(runtime, after_commit)
    return str(row.status)


def _ended_before(runtime: Runtime, hold: Hold) -> str:
    """Return the status after an end whose answer was lost: the sweeper does the follow-up work."""
    row = claims.outcome(runtime.connections, hold.job_id)
    return str(row.status if row is not None else Status.TERMINATED)


def _end(
    runtime: LocalRuntime, applied: Applied, hold: Hold, unit: Unit | None, ending: Ending, *, by_worker: bool
) -> str:
    """End a run in the transaction that has locked its job, and return the job's status; the order matters."""
    executor = applied.lock_set.executor
    if unit is not None and _is_thrown_away(applied, hold, unit):
        unit, ending = Unit(took=unit.took), Ending(RunEnd.SUSPENDED)
    else:
        if unit is not None:
            applied.mailboxes.have_read(consume(executor, hold, unit))
        applied.apply()
    if ending.waits_for and not wait_for_room(executor, hold, ending.waits_for, applied.after_commit):
        applied.wakes.ask([hold.job_id])  # there is room by now, so the run begins again at once
    if ending.outcome == Status.FAILED:
        applied.wakes.apply_due(hold.job_id)  # asks noted and committed by now came before the failure
    row = end_job_run(runtime, executor, hold, unit, ending, applied.after_commit, by_worker=by_worker)
    if row is None:
        raise lease_lost(hold)
    announce(hold, applied.lock_set.statuses[hold.job_id], row, ending, applied.after_commit)
    applied.lock_set.statuses[hold.job_id] = row.status
    _wake_parent(applied, ending, row)
    return str(row.status)


def _locked(
    runtime: LocalRuntime,
    executor: Transaction,
    hold: Hold,
    changes: list[Change],
    parents: Mapping[int, int | None],
    *,
    any_unit: bool,
) -> Applied:
    """Lock the jobs that the end of a run affects; `changes` are those of its last unit, and get those of a shutdown.

    Raises LeaseLostError if the run is no longer current.
    """
    begun: set[int] = set()
    handed_down = hold.kind == "shutdown" and _hand_down(executor, hold, changes, begun)
    applied = Applied(runtime, executor, changes, hold=hold)
    applied.after_commit.trees |= begun
    applied.lock(parents=parents, any_unit=any_unit)
    job = applied.lock_set.rows[hold.job_id]
    if hold.kind == "shutdown" and job.terminate_tree and not handed_down:
        raise Moved("the shutdown became one of the whole tree")
    return applied


def _wake_parent(applied: Applied, ending: Ending, row: Any) -> None:
    """Ask the parent to run, if the job has ended its asking and the parent may be asked; `row` is the job's new row.

    A retry, the next stage, and a wait for room go on with the asking.
    """
    may_run = row.parent_id is not None and applied.lock_set.statuses.get(row.parent_id) in ASKABLE
    if may_run and ending.then is None and ending.how != RunEnd.RETRIED and not ending.waits_for:
        applied.wakes.wake(row.parent_id, looks=True)
        applied.wakes.apply()


def _is_thrown_away(applied: Applied, hold: Hold, unit: Unit) -> bool:
    """Tell whether the job was asked during the last run of its steps: then the next run repeats that run."""
    unit.thrown_away = False
    if unit.replays:
        applied.wakes.apply_due(hold.job_id)  # asks noted and committed by now came before the end
        unit.thrown_away = applied.lock_set.statuses[hold.job_id] == Status.QUEUED
    return unit.thrown_away


def _hand_down(executor: Transaction, hold: Hold, changes: list[Change], begun: set[int]) -> bool:
    """Terminate the children of a recursively terminated job too, including children added since.

    The unit's own new children are terminated with it. The others are recorded, with the job among `begun` as their
    root, and terminated after the commit.
    """
    row = claims.read_claimed(executor, hold.job_id)
    if row is None or not row.terminate_tree:
        return False
    new = [change.id for change in changes if isinstance(change, NewJob) and change.parent_id == hold.job_id]
    changes += [Terminate(child, tree=True) for child in new]
    begun |= trees.hand_down(executor, hold.job_id)
    return True


def announce(hold: Hold, before: str, ended: Any, ending: Ending, after_commit: AfterCommit) -> None:
    """Report the outcome, then the job's new status: failed, then queued, if the job was asked again meanwhile.

    `ended` is the job's new row. An end counts as two changes, so that both statuses have a number.
    """
    status = ended.status
    if status == Status.TERMINATING:
        reached: list[str] = []
    elif status == ending.outcome or ending.how == RunEnd.RETRIED or ending.then is not None:
        reached = [status]
    else:
        reached = [str(ending.outcome), status]
    for number, after in enumerate(reached, ended.changes + 1 - len(reached)):
        after_commit.moved(hold.row, before, after, number, hold.run_no, hold.row.task_id)
        before = after


def error_json(kind: str, message: str, module: str, traceback: str | None = None, group: str | None = None) -> str:
    """Return an error in the form of rows, with its failure group if a JobFailed has named one."""
    kept = {"v": FORMAT, "type": kind, "module": module, "message": storable(message), "traceback": traceback}
    return json.dumps(kept if group is None else {**kept, "group": group})


# -- what every end of a run does --------------------------------------------------------------------------------------


def end_job_run(  # noqa: PLR0913 - a run, how it ended, and where that is written
    runtime: LocalRuntime,
    executor: Transaction,
    hold: Hold,
    unit: Unit | None,
    ending: Ending,
    after_commit: AfterCommit,
    *,
    by_worker: bool = False,
    quiet: bool = False,
) -> Any | None:
    """End a run; update the asking, the message and the dead set as the job's new status requires.

    `unit` is the run's last unit, applied already; None if the run's unit was discarded. `by_worker`: the worker ends
    its own run, however many units that run committed. `quiet`: see `run_ends.end`. Returns the job's new row; None if
    the run was no longer current: then nothing was written.
    """
    closes = closing(runtime, hold, ending)
    row = _write(runtime, executor, hold, unit, ending, closes, by_worker=by_worker, quiet=quiet)
    if row is None:
        return None
    if unit is None or unit.took:  # readers of the packets that are given back may have found nothing meanwhile
        note_asks(executor, packets.release(executor, hold.job_id, hold.run_no), after_commit)
    if ending.gives_up and row.parent_id is not None:  # a rescue has not locked the parent
        asks.note(executor, [row.parent_id], "look")
        after_commit.noted.append(row.parent_id)
    if row.task_id is not None:
        _follow_closing(runtime, executor, row, closes, after_commit)
    if row.goes_on:
        _arm_next_run(runtime, executor, hold, row, ending, after_commit)
    if row.has_dependents:
        mark_ended(executor, hold.job_id, row.status, after_commit)
    if row.status == Status.TERMINATED:
        asks.drop_runs(executor, hold.job_id)
        ports.unsubscribe(executor, hold.job_id)  # no run would read the messages of its channels
    _note_failure(hold, ending, after_commit)
    after_commit.events += measuring.ended(hold, ending.how, gives_up=ending.gives_up == Status.FAILED)
    if row.status in (Status.FAILED, ending.gives_up):
        _bury(executor, hold, row, ending, after_commit)
    return row


def end_page(runtime: LocalRuntime, executor: Transaction, runs: Collection[Ended], *, worker_id: int) -> Sequence[Any]:
    """End runs that leave nothing else to be written; see `run_ends.end_page`."""
    return run_ends.end_page(executor, runs, worker_id=worker_id, history=runtime.settings.history) if runs else ()


def _note_failure(hold: Hold, ending: Ending, after_commit: AfterCommit) -> None:
    """Note the event of a run that ended with an error and will not be tried again."""
    if ending.error and ending.how != RunEnd.RETRIED:
        shown = json.loads(ending.error)
        error = shown["message"] or shown["type"]
        after_commit.events.append(
            RunFailed(hold.job_id, hold.row.task, hold.run_no, error, ending.traceback or shown.get("traceback"))
        )


def _write(  # noqa: PLR0913 - as above
    runtime: LocalRuntime,
    executor: Transaction,
    hold: Hold,
    unit: Unit | None,
    ending: Ending,
    closing: Closing | None,
    *,
    by_worker: bool,
    quiet: bool,
) -> Any | None:
    unwanted = runtime.results.in_store or not runtime.results.wanted(hold.row.task, None)
    run: dict[str, Any] = {"run_no": hold.run_no, "worker_id": hold.worker_id, "past": _past(runtime, hold, ending)}
    if ending.how in TAKEN:
        gives_up = None if ending.gives_up is None else str(ending.gives_up)
        return run_ends.release(
            executor,
            hold.job_id,
            **run,
            own=by_worker,
            loss=ending.how == RunEnd.LOST,
            undone=ending.undone,
            outcome=gives_up,
            error=ending.error,
            unwanted=unwanted,
        )
    keeps = None if closing is None else closing.keeps
    row = run_ends.end(
        executor,
        hold.job_id,
        **run,
        unit_no=None if by_worker else hold.unit_no,
        outcome=str(ending.outcome),
        result=ending.result,
        unwanted=unwanted,
        applied=unit is not None,
        retry=ending.how == RunEnd.RETRIED or ending.then is not None,
        error=ending.error,
        then=ending.then is not None,
        quiet=quiet,
        keeps=keeps,
    )
    if row is not None and closing is not None and keeps is not None:
        closing.riders[0].kept(is_listened=row.listened)
    return row


def _past(runtime: LocalRuntime, hold: Hold, ending: Ending) -> run_ends.Past:
    """Return the details of the end for the history.

    These are the facts of a loss, or the class, the group and the beginning of the message of an error.
    """
    keeps, shown = (
        0 if ending.undone else runtime.settings.history,
        {} if ending.loss is None else dict(ending.loss.facts),
    )
    if keeps and ending.error:
        error = json.loads(ending.error)
        group = error.get("group") or error["type"]
        shown |= {"error": error["type"], "group": group, "message": error["message"][:MOST_OF_MESSAGE]}
    how = "terminated" if ending.gives_up == Status.TERMINATED else str(ending.how)
    return {"how": how, "kind": hold.kind, "detail": json.dumps(shown) if shown else None, "history": keeps}


def closing(runtime: LocalRuntime, hold: Hold, ending: Ending) -> Closing | None:
    """Return how the run's asking ends, in case this end closes it; None if it does not, or the run has none."""
    if ending.outcome in (None, Status.SUSPENDED) or hold.row.task_id is None:
        return None
    ended = outcome_of(hold.row, str(ending.outcome), ending.result)
    wanted = runtime.results.wanted(ended.task, ended.options)
    riders = runtime.results.riders(ended) if wanted else ()
    return Closing(ended, wanted, riders, result_of(riders) if ending.how not in TAKEN else None)


def outcome_of(job: Any, outcome: str, result: str) -> Outcome:
    """Return how an asking ended; `job` is the row of the job with its asking."""
    options = json.loads(job.options) if job.options else None
    return Outcome(job.task_id, job.id, job.task, job.queue, outcome, result, options, job.args, job.kwargs)


def _follow_closing(
    runtime: LocalRuntime, executor: Transaction, row: Any, closing: Closing | None, after_commit: AfterCommit
) -> None:
    """Write the continuations of the asking that was just closed, and its result, or have the backend store it.

    Errbacks are called after the commit, because they may read the result. A job that now waits only for a timer keeps
    the asking's unique key, like a job that goes on.
    """
    assert closing is not None
    ended, in_store = closing.ended, runtime.results.in_store
    for continuation in runtime.results.continuations(ended):
        doorbells.keep_continuation(executor, continuation, check_interval_s=runtime.settings.lost_after)
        after_commit.continuations.append(continuation)
    for rider in closing.riders:
        if closing.keeps is None:
            rider.write(executor)
        after_commit.riders.append(rider)
    has_errbacks = ended.outcome == Status.FAILED and (ended.options or {}).get("link_error")
    if closing.wanted and (has_errbacks or not in_store):
        after_commit.outcomes.append(replace(ended, is_told=in_store))
    elif row.options:
        asks.mark_stored(executor, [row.task_id])
    if row.status == Status.QUEUED and not row.goes_on:
        asks.keep_key(executor, row.id)


def _arm_next_run(
    runtime: LocalRuntime, executor: Transaction, hold: Hold, row: Any, ending: Ending, after_commit: AfterCommit
) -> None:
    """Turn the run's message into the next run's; after a retry the sweeper publishes it when its backoff is over."""
    is_queued = row.status == Status.QUEUED
    stage = _begin_stage(executor, hold, ending, after_commit) if is_queued and ending.then is not None else None
    task_id = None
    if is_queued and (row.task_id or ending.outcome == Status.TERMINATED):
        task_id = asks.open_next(executor, hold.job_id)
    elif row.task_id:
        task_id = asks.keep_key(executor, hold.job_id) or str(uuid.uuid4())  # for the shutdown
    wait_s = ending.retry_in_s if is_queued else 0.0
    armed = arming.rearm(
        executor,
        hold.job_id,
        task_id=task_id,
        wait_s=wait_s,
        takes=ending.takes,
        check_interval_s=runtime.settings.lost_after,
    )
    if stage is not None or armed.for_run is not None:
        after_commit.ring(hold.row if stage is None else hold.row._replace(**stage._asdict()), armed)


def _begin_stage(executor: Transaction, hold: Hold, ending: Ending, after_commit: AfterCommit) -> Any:
    """Give the job the stage that its run asked for; returns the changes of its row."""
    assert ending.then is not None
    add_ports(executor, hold.job_id, ending.then.ports, after_commit)
    return jobs.set_stage(executor, hold.job_id, ending.then)


def _bury(executor: Transaction, hold: Hold, row: Any, ending: Ending, after_commit: AfterCommit) -> None:
    """Enter the job in the dead set, with the wake that was pending when its last run was lost."""
    job = hold.row
    shown = json.loads(ending.error) if ending.error else {}
    error = f"{shown.get('type', '')}: {shown.get('message', '')}"
    death = Death(ending.reason, error, ending.traceback, job.retries, shown.get("group"))
    wake_pending = ending.gives_up == Status.FAILED and job.status == Status.QUEUED
    loss = None if ending.loss is None else ending.loss.json
    entry = dead.bury(executor, job.id, death, task_id=row.task_id, wake_pending=wake_pending, loss=loss)
    after_commit.events.append(JobBuried(job.id, job.task, entry, ending.reason))
