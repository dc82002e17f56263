"""Terminations that are more than a change: of many jobs together, and of jobs without their shutdown.

A shutdown is not called if the caller does not want it, or no worker has the task any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...model.changes import Terminate
from ...model.errors import LeaseLostError
from ...model.status import RunEnd, Status
from ...store import jobs, parked, trees, workers
from ...store.errors import Moved
from ...store.statement import Reader, Transaction
from ..after_commit import AfterCommit
from ..changes.dependencies import check_no_dependents, with_dependents
from ..changes.follow_up import follow_up
from ..changes.unit_of_work import Applied
from ..hold import Hold
from ..runtime import Runtime
from .endings import Ending, end
from .runs import Unit, begin_locked

TOGETHER = 500
"""The most jobs of a tree whose shutdowns one transaction begins: their ends must not outlast this process's lease."""


def to_cancel(executor: Reader, job_ids: Sequence[int], *, dependents: bool) -> list[int]:
    """Return the ids of the jobs to terminate; raises HasDependentsError if other jobs depend on them."""
    if dependents:
        return sorted(with_dependents(executor, job_ids))
    check_no_dependents(executor, job_ids)
    return sorted(set(job_ids))


def cancel(runtime: Runtime, job_ids: Sequence[int], *, dependents: bool) -> list[int]:
    """Terminate jobs, with `dependents` also all jobs that wait for them, or none; returns the ids of all.

    Raises HasDependentsError, and JobNotFoundError for a job that does not exist. A job that becomes dependent on one
    of them meanwhile waits for a terminating job, as if it had become so afterwards.
    """

    def work(executor: Transaction) -> tuple[Applied, list[int]]:
        ids = to_cancel(executor, job_ids, dependents=dependents)
        applied = Applied(runtime, executor, [Terminate(job_id) for job_id in ids])
        applied.lock()
        if to_cancel(executor, job_ids, dependents=dependents) != ids:
            raise Moved("other jobs were made to depend on these before they were locked")
        applied.apply()
        return applied, ids

    applied, ids = runtime.connections.transact("cancel", work)
    follow_up(runtime, applied.after_commit)
    return ids


# -- without a shutdown ------------------------------------------------------------------------------------------------


def terminate_without_shutdown(runtime: Runtime, job_id: int, *, recursive: bool) -> bool:
    """Terminate a job without its shutdown, with `recursive` everything below it too; returns whether that is done.

    This process registers as a worker for that moment, claims the shutdowns, and ends each like a shutdown whose hook
    has raised: results, children and parents are handled as usual. The transaction that asks for the shutdowns claims
    them, past any gate, so no worker begins them; in a tree with more than `TOGETHER` jobs workers may begin some. A
    run in progress is not touched. If this process dies in between, the sweeper rescues the claimed jobs, which are
    terminating as before.
    """

    def work(executor: Transaction, worker_id: int) -> tuple[AfterCommit, list[Hold]]:
        applied = Applied(runtime, executor, [Terminate(job_id, tree=recursive)]).done()
        asked = sorted(each for each, status in applied.lock_set.statuses.items() if status == Status.TERMINATING)
        holds = begin_locked(executor, asked[:TOGETHER], worker_id=worker_id)
        for hold in holds:
            applied.after_commit.silence(hold.job_id)
        return applied.after_commit, holds

    with workers.as_worker(runtime.connections) as worker_id:
        after_commit, holds = runtime.connections.transact("terminate", partial(work, worker_id=worker_id))
        follow_up(runtime, after_commit, to_the_end=True)
        for hold in holds:
            _end_begun(runtime, hold)
        end_one = partial(_end, runtime, worker_id=worker_id)
        while sum(map(end_one, _terminating(runtime, job_id, recursive))):
            pass  # jobs that were parked or terminating before; and each end terminates the children
    return not _terminating(runtime, job_id, recursive)


def end_parked(runtime: Runtime, job_id: int) -> bool:
    """Do the same for a job that is terminating; False if it is no longer parked, because a worker knows its task."""
    with workers.as_worker(runtime.connections) as worker_id:
        return _end(runtime, job_id, worker_id=worker_id, only_parked=True)


def _terminating(runtime: Runtime, job_id: int, recursive: bool) -> list[int]:
    read: Callable[[Reader, list[int]], Sequence[Any]] = trees.subtree if recursive else jobs.find
    return [row.id for row in read(runtime.connections, [job_id]) if row.status == Status.TERMINATING]


def _end(runtime: Runtime, job_id: int, *, worker_id: int, only_parked: bool = False) -> bool:
    def begin(executor: Transaction) -> list[Hold]:
        job = jobs.lock(executor, [job_id]).get(job_id)
        if job is None or job.status != Status.TERMINATING:
            return []
        if not parked.release_one(executor, job_id) and only_parked:
            return []
        return begin_locked(executor, [job_id], worker_id=worker_id)

    holds = runtime.connections.timed("claim", begin)
    return any(_end_begun(runtime, hold) for hold in holds)


def _end_begun(runtime: Runtime, hold: Hold) -> bool:
    try:
        end(runtime, hold, Unit(), Ending(RunEnd.TERMINATED))
    except LeaseLostError:  # this took so long that this process was declared dead
        return False
    return True
