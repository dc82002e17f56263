"""Runs of jobs that a worker claims before their processes begin them, and ends after that, many in one statement."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ..model.status import RunEnd, Status
from ..store import claims, jobs
from ..store.claims import Owed
from ..store.errors import locked_out
from ..store.statement import Transaction, row_type
from . import measuring
from .after_commit import AfterCommit, follow
from .endings import announce, end, may_be_quiet
from .hold import Hold
from .job_run_end import Ending, end_page
from .retrying import patience_s
from .runs import LOOK_MOST, Unit, held
from .runtime import Runtime

RunKey = tuple[int, int]
"""(job id, run number)"""


class Claimed(NamedTuple):
    """A run that a worker has claimed: all that the run's process needs to begin."""

    worker_id: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """What `claims.claim` returns: the job, then its children."""
    heard: tuple[bool, bool, float]
    """Who listens, as the worker knows it: see `Audience.known`."""
    stands: bool = True
    """Whether it is the job's current run for sure; else its process has to ask."""

    def hold(self) -> Hold:
        """Return the hold of the run, as of now."""
        row = row_type(tuple(self.columns))
        return held([row(*values) for values in self.rows], self.worker_id, in_page=True)


# -- in the worker -----------------------------------------------------------------------------------------------------


def claim_page(
    runtime: Runtime, owed: Collection[Owed], *, worker_id: int, over: Collection[RunKey]
) -> tuple[dict[RunKey, Claimed], Sequence[Any]]:
    """Begin runs that nobody has begun, and end those that are `over`, in one transaction.

    Returns the runs that were begun, and the jobs' new rows of those that have ended; see `claims.claim_page` and
    `claims.end_page`. Waits for no job that a transaction has locked.

    If the process dies after the commit, or the answer is lost, nobody has begun what the worker then holds.
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
    found, ended = runtime.connections.timed("claim-page", work, single=single, within_s=patience_s(runtime))
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
    """Do what follows the end of a run that was written in a page: `row` is the job's new one."""
    after_commit = AfterCommit()
    announce(hold, Status.RUNNING, row, Ending(RunEnd.COMPLETED), after_commit)
    follow(runtime, after_commit)


def end_alone(runtime: Runtime, hold: Hold, *, is_unknown: bool) -> None:
    """End a run that could not be ended in a page: its job was asked meanwhile, or has others to wake.

    `is_unknown`: it may have ended before, by a statement whose answer was lost. Raises LeaseLostError if the run was
    taken from its worker, and RowsLocked, without waiting, if somebody's transaction has locked its job.
    """
    if runtime.connections.read(lambda executor: jobs.is_locked(executor, hold.job_id)):
        raise locked_out("end", f"a transaction that has locked job {hold.job_id}")
    hold.in_doubt, hold.began_at = is_unknown, None
    end(runtime, hold, Unit(), Ending(RunEnd.COMPLETED))


# -- in the process of a run -------------------------------------------------------------------------------------------


def begin(runtime: Runtime, claimed: Claimed) -> Hold | None:
    """Begin a run that this process's worker has claimed; None if it was taken from the worker since."""
    runtime.audience.hear(claimed.heard)
    hold = claimed.hold()
    if not claimed.stands:
        row = claims.outcome(runtime.connections, hold.job_id)
        if row is None or (row.run_no, row.worker_id, row.unit_no) != (hold.run_no, hold.worker_id, 0):
            return None
    measuring.begun(runtime, hold)
    return hold


def may_leave(runtime: Runtime, hold: Hold, unit: Unit, ending: Ending) -> bool:
    """Tell whether the worker may write the end of a run: as far as the run knows, nothing else is to be written.

    Nobody may be waiting for its result, for room in its ports, or in this process for the signal of its end.
    """
    if not hold.in_page or hold.unit_no or ending.how != RunEnd.COMPLETED or not may_be_quiet(hold, unit, ending):
        return False
    if hold.row.waited_for_room or runtime.observer.is_heard:
        return False
    return not runtime.results.wanted(hold.row.task, None)


def leave(runtime: Runtime, hold: Hold) -> None:
    """Count the run whose end its worker is to write: only its own process knows how long it took."""
    for event in measuring.ended(hold, RunEnd.COMPLETED, gives_up=False):
        runtime.observer.tell(event)
