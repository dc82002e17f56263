"""Terminating a job whose shutdown is not to be run, or cannot be: no worker has its task any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..model.changes import Terminate
from ..model.errors import LeaseLostError
from ..model.run_end import RunEnd
from ..model.status import Status
from ..store import jobs, parked, trees, workers
from ..store.statement import Reader, Transaction
from .after_commit import AfterCommit
from .endings import end
from .follow_up import follow_up
from .hold import Hold
from .job_run_end import Ending
from .runs import Unit, begin_locked
from .runtime import Runtime
from .unit_of_work import Applied


def terminate_without_shutdown(runtime: Runtime, job_id: int, *, recursive: bool) -> bool:
    """Ask for a job's shutdown, with `recursive` for everything below it too, and end it without; whether that is done.

    The transaction that asks begins the shutdowns that are owed, so no worker begins them, and no gate holds them up.
    Of a tree that is too large for one transaction a worker may run some.
    """

    def work(executor: Transaction, worker_id: int) -> tuple[AfterCommit, list[Hold]]:
        applied = Applied(runtime, executor, [Terminate(job_id, tree=recursive)]).done()
        for each in (statuses := applied.lock_set.statuses):
            applied.after_commit.silence(each)
        asked = [each for each, status in statuses.items() if status == Status.TERMINATING]
        return applied.after_commit, begin_locked(executor, asked, worker_id=worker_id)

    with workers.as_worker(runtime.connections) as worker_id:
        after_commit, holds = runtime.connections.transact("terminate", partial(work, worker_id=worker_id))
        follow_up(runtime, after_commit, to_the_end=True)
        for hold in holds:
            _end_begun(runtime, hold)
    return end_without_shutdown(runtime, job_id, recursive=recursive)


def end_without_shutdown(runtime: Runtime, job_id: int, *, recursive: bool = False, only_parked: bool = False) -> bool:
    """Terminate a terminating job without its shutdown; returns whether that is done.

    This process claims it as a worker, which it is for that moment, and its run ends like one whose hook has raised:
    results, children and parents are handled as usual. A run in progress is left alone. With `recursive` everything
    below is terminated too. With `only_parked` nothing is done once a worker has come to know the task. If this process
    dies in between, the sweeper rescues the claimed run: the job is terminating as before.
    """
    if not _terminating(runtime, job_id, recursive):
        return True
    with workers.as_worker(runtime.connections) as worker_id:
        end_one = partial(_end, runtime, worker_id=worker_id, only_parked=only_parked)
        while sum(map(end_one, _terminating(runtime, job_id, recursive))):
            pass  # each end has the children terminated
    return not _terminating(runtime, job_id, recursive)


def _terminating(runtime: Runtime, job_id: int, recursive: bool) -> list[int]:
    read: Callable[[Reader, list[int]], Sequence[Any]] = trees.subtree if recursive else jobs.find
    return [row.id for row in read(runtime.connections, [job_id]) if row.status == Status.TERMINATING]


def _end(runtime: Runtime, job_id: int, *, worker_id: int, only_parked: bool) -> bool:
    def begin(executor: Transaction) -> list[Hold]:
        job = jobs.lock(executor, [job_id]).get(job_id)
        if job is None or job.status != Status.TERMINATING:
            return []
        if not parked.release_one(executor, job_id) and only_parked:
            return []
        return begin_locked(executor, [job_id], worker_id=worker_id)

    holds = runtime.connections.transact("claim", begin)
    return any(_end_begun(runtime, hold) for hold in holds)


def _end_begun(runtime: Runtime, hold: Hold) -> bool:
    try:
        end(runtime, hold, Unit(), Ending(RunEnd.TERMINATED))
    except LeaseLostError:  # this took so long that we were declared dead
        return False
    return True
