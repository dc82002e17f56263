"""Terminating a job whose shutdown no worker can run, because no worker has its task any more."""

from __future__ import annotations

from ..model.errors import LeaseLostError
from ..model.run_end import RunEnd
from ..model.status import Status
from ..store import parked, trees, workers
from ..store.outbox import doorbells
from . import recovery
from .endings import end
from .job_run_end import Ending
from .runs import Unit, claim
from .runtime import Runtime


def end_without_shutdown(runtime: Runtime, job_id: int, *, recursive: bool = False) -> bool:
    """Terminate a terminating job without its shutdown; returns whether that is done.

    This process claims it as a worker, which it is for that moment, and its run ends like one whose hook has raised:
    results, children and parents are handled as usual. A run in progress is left alone. With `recursive` everything
    below is terminated too. If this process dies in between, the sweeper rescues the claimed run: the job is
    terminating as before.
    """
    with workers.as_worker(runtime.connections) as worker_id:
        while sum(_end(runtime, one, worker_id) for one in _terminating(runtime, job_id, recursive)):
            pass  # each end has the children terminated
    return not _terminating(runtime, job_id, recursive)


def _terminating(runtime: Runtime, job_id: int, recursive: bool) -> list[int]:
    rows = trees.subtree(runtime.connections, [job_id])
    return [row.id for row in rows if row.status == Status.TERMINATING and (recursive or row.id == job_id)]


def _end(runtime: Runtime, job_id: int, worker_id: int) -> bool:
    parked.release_one(runtime.connections, job_id)
    due = doorbells.waiting(runtime.connections, [job_id])
    hold = claim(runtime, job_id, task=due[0].task, for_run=due[0].for_run, worker_id=worker_id) if due else None
    if hold is None:
        return False
    if hold.kind != "shutdown":  # a worker's shutdown was faster, and a forced run follows it
        recovery.release(runtime, job_id, run_no=hold.run_no, worker_id=worker_id, wait=True)
        return False
    try:
        end(runtime, hold, Unit(), Ending(RunEnd.TERMINATED))
    except LeaseLostError:  # this took so long that we were declared dead
        return False
    return True
