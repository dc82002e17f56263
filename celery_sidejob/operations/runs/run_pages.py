"""Runs of jobs that a worker claims before their processes begin them, and ends afterwards, many in one statement."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ...model.status import RunEnd, Status
from ...store import claims, jobs
from ...store.claims import Owed
from ...store.errors import locked_out
from ...store.results import Ended
from ...store.statement import Transaction, row_type
from ..after_commit import AfterCommit, follow
from ..hold import Hold
from ..runtime import Runtime
from . import measuring
from .endings import Ending, announce, closing, end, end_page, may_be_quiet
from .runs import LOOK_MOST, Unit, held

RunKey = tuple[int, int]
"""(job id, run number)"""


class Claimed(NamedTuple):
    """A claimed run with everything that the run's process needs to begin."""

    worker_id: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """The rows of `claims.claim`: the job, then its children."""
    heard: tuple[bool, bool, float]
    """The listeners as the worker knows them: see `Audience.known`."""
    stands: bool = True
    """Whether it is the job's current run for sure; otherwise its process must ask."""

    def hold(self) -> Hold:
        """Return the hold of the run, as of now."""
        row = row_type(tuple(self.columns))
        return held([row(*values) for values in self.rows], self.worker_id, in_page=True)


# -- in the worker -----------------------------------------------------------------------------------------------------


def claim_page(
    runtime: Runtime, owed: Collection[Owed], *, worker_id: int, over: Collection[Ended]
) -> tuple[dict[RunKey, Claimed], Sequence[Any]]:
    """Begin runs that have not begun, and end those that are `over`, in one transaction.

    Returns the runs that were begun, and the jobs' new rows of those that have ended; see `claims.claim_page` and
    `run_ends.end_page`. Waits for no job that a transaction has locked.

    If the process dies after the commit, or the answer is lost, the worker holds runs that no process has begun.
    """
    schema, asked_at = runtime.audience.to_ask, time.monotonic()

    def work(executor: Transaction) -> tuple[Sequence[Any], Sequence[Any]]:
        ended = end_page(runtime, executor, over, worker_id=worker_id)
        if not owed:
            return (), ended
        begun = claims.claim_page(
            executor, owed, worker_id=worker_id, max_losses=runtime.settings.max_losses, most=LOOK_MOST, schema=schema
        )
        return begun, ended

    single = not (owed and over)
    found, ended = runtime.connections.timed("claim-page", work, single=single, within_s=runtime.patience_s)
    families: dict[int, list[Any]] = {}
    for row in sorted(found, key=lambda row: row.came_late is None):  # a job before its children
        families.setdefault(row.id if row.came_late is not None else row.parent_id, []).append(row)
    for rows in families.values():
        runtime.audience.learn(rows[0], asked_at)
    heard = runtime.audience.known
    return {
        (rows[0].id, rows[0].run_no): Claimed(worker_id, rows[0]._fields, [tuple(row) for row in rows], heard)
        for rows in families.values()
    }, ended


def follow_end(runtime: Runtime, hold: Hold, row: Any) -> None:
    """Do the work that follows the end of a run in a page; `row` is the job's new row."""
    after_commit = AfterCommit()
    announce(hold, Status.RUNNING, row, Ending(RunEnd.COMPLETED), after_commit)
    follow(runtime, after_commit)


def end_alone(runtime: Runtime, hold: Hold, result: str, *, is_unknown: bool) -> None:
    """End a run that could not be ended in a page: its job was asked meanwhile, or must wake others.

    `is_unknown`: it may have ended before, by a statement whose answer was lost. Raises LeaseLostError if the run was
    taken from its worker, and RowsLocked, without waiting, if another transaction has locked its job.
    """
    if runtime.connections.read(lambda executor: jobs.is_locked(executor, hold.job_id)):
        raise locked_out("end", f"a transaction that has locked job {hold.job_id}")
    hold.in_doubt, hold.began_at = is_unknown, None
    end(runtime, hold, Unit(), Ending(RunEnd.COMPLETED, result=result))


# -- in the process of a run -------------------------------------------------------------------------------------------


def begin(runtime: Runtime, claimed: Claimed) -> Hold | None:
    """Begin a run that this process's worker has claimed; None if it has been taken from the worker."""
    runtime.audience.hear(claimed.heard)
    hold = claimed.hold()
    if not claimed.stands:
        row = claims.outcome(runtime.connections, hold.job_id)
        if row is None or (row.run_no, row.worker_id, row.unit_no) != (hold.run_no, hold.worker_id, 0):
            return None
    measuring.begun(runtime, hold)
    return hold


def to_leave(runtime: Runtime, hold: Hold, unit: Unit, ending: Ending) -> Ended | None:
    """Return the end of a run for its worker to write; None if there is more to write, as far as the run knows.

    No job may wait for room in its ports, and no receiver here for the signal of its end; its result, if a caller may
    wait for that, must be a small one that is kept in the store.
    """
    if not hold.in_page or hold.unit_no or ending.how != RunEnd.COMPLETED or not may_be_quiet(hold, unit, ending):
        return None
    if hold.row.waited_for_room or runtime.observer.is_heard:
        return None
    result = closing(runtime, hold, ending)
    if result is not None and result.wanted and not (result.keeps is not None and result.keeps.is_small):
        return None
    return Ended((*hold.key, ending.result), None if result is None else result.keeps)


def leave(runtime: Runtime, hold: Hold) -> None:
    """Count a run whose end its worker will write: only its own process knows its duration."""
    for event in measuring.ended(hold, RunEnd.COMPLETED, gives_up=False):
        runtime.observer.tell(event)
