"""Terminating a job whose shutdown no worker can run, because no worker has its task any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..model.errors import LeaseLostError
from ..model.run_end import RunEnd
from ..model.status import Status
from ..store import jobs, parked, trees, workers
from ..store.outbox import doorbells
from ..store.statement import Reader
from . import recovery
from .endings import end
from .job_run_end import Ending
from .runs import Unit, claim
from .runtime import Runtime


def end_without_shutdown(runtime: Runtime, job_id: int, *, recursive: bool = False, only_parked: bool = False) -> bool:
    """Terminate a terminating job without its shutdown; returns whether that is done.

    This process claims it as a worker, which it is for that moment, and its run ends like one whose hook has raised:
    results, children and parents are handled as usual. A run in progress is left alone. With `recursive` everything
    below is terminated too. With `only_parked` nothing is done once a worker has come to know the task. If this process
    dies in between, the sweeper rescues the claimed run: the job is terminating as before.
    """
    with workers.as_worker(runtime.connections) as worker_id:
        end_one = partial(_end, runtime, worker_id=worker_id, only_parked=only_parked)
        while sum(map(end_one, _terminating(runtime, job_id, recursive))):
            pass  # each end has the children terminated
    return not _terminating(runtime, job_id, recursive)


def _terminating(runtime: Runtime, job_id: int, recursive: bool) -> list[int]:
    read: Callable[[Reader, list[int]], Sequence[Any]] = trees.subtree if recursive else jobs.find
    return [row.id for row in read(runtime.connections, [job_id]) if row.status == Status.TERMINATING]


def _end(runtime: Runtime, job_id: int, *, worker_id: int, only_parked: bool) -> bool:
    if not parked.release_one(runtime.connections, job_id) and only_parked:
        return False
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
