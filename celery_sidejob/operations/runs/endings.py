"""The end of a run by the run or its worker: its last unit, the end and the parent's wake, in one commit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...model.changes import Change, NewJob, Terminate
from ...model.crash_points import reach
from ...model.errors import JobNotFoundError
from ...model.messages import FORMAT
from ...model.names import storable
from ...model.status import ASKABLE, RunEnd, Status
from ...store import claims, jobs, trees
from ...store.errors import FAILURES, Moved
from ...store.statement import Transaction
from ..after_commit import AfterCommit, follow
from ..changes.follow_up import follow_up
from ..changes.unit_of_work import Applied
from ..gates import capacity
from ..gates.permits import freed
from ..hold import Hold, check_fence, lease_lost, repeat_until_known
from ..runtime import LocalRuntime, Runtime
from .job_run_end import Ending, end_job_run
from .limits import pass_on, wait_for_room
from .runs import Unit, consume

QUIET = (RunEnd.COMPLETED, RunEnd.SUSPENDED)
"""Ends that need no lock before them if there is nothing else to write."""


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
        return _end(runtime, executor, hold, unit, ending, from_outside, parents)

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


def _end(  # noqa: PLR0913 - which run, how it has ended, and what is known of it
    runtime: LocalRuntime,
    executor: Transaction,
    hold: Hold,
    unit: Unit | None,
    ending: Ending,
    from_outside: bool,
    parents: Mapping[int, int | None],
) -> tuple[Applied, str]:
    """End a run in this transaction; the order of what it does matters."""
    changes = list(unit.changes if unit is not None else ending.asked)
    applied = _locked(runtime, executor, hold, changes, parents, any_unit=from_outside)
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
    row = end_job_run(runtime, executor, hold, unit, ending, applied.after_commit, by_worker=from_outside)
    if row is None:
        raise lease_lost(hold)
    announce(hold, applied.lock_set.statuses[hold.job_id], row, ending, applied.after_commit)
    applied.lock_set.statuses[hold.job_id] = row.status
    _wake_parent(applied, ending, row)
    return applied, row.status


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
    applied = Applied(runtime, executor, changes, own=hold.job_id, bounded=hold.kind != "shutdown")
    applied.after_commit.trees |= begun
    try:
        applied.lock([hold.job_id], parents=parents)
    except JobNotFoundError:
        check_fence(hold, applied.lock_set.rows.get(hold.job_id), any_unit=any_unit)
        raise
    job = applied.lock_set.rows[hold.job_id]
    check_fence(hold, job, any_unit=any_unit)
    if hold.kind == "shutdown" and job.terminate_tree and not handed_down:
        raise Moved("the shutdown became one of the whole tree")
    return applied


def _wake_parent(applied: Applied, ending: Ending, row: Any) -> None:
    """Ask the parent to run, if the job has ended its asking and the parent may be asked; `row` is the job's new row.

    A retry, the next stage, and a wait for room go on with the asking.
    """
    may_run = row.parent_id is not None and applied.lock_set.statuses.get(row.parent_id) in ASKABLE
    if may_run and ending.then is None and ending.how != RunEnd.RETRIED and not ending.waits_for:
        applied.wakes.look(row.parent_id)
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
