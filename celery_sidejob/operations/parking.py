"""Parking jobs whose task no worker of their queue knows, and releasing them when a worker comes to know it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..model.events import JobParked
from ..store import parked, served
from ..store.statement import Transaction
from .runtime import Runtime

logger = logging.getLogger("celery_sidejob")


def park(runtime: Runtime, job_id: int, *, for_run: int, task: str) -> None:
    """Park a job whose message a worker has received that does not know its task.

    If a live worker of the queue knows the task, the message is sent again in a second instead. If the process dies
    before the commit, the message counts as missing and is sent again too.
    """

    def work(executor: Transaction) -> tuple[Any | None, bool]:
        parked.take_turn(executor)
        row = parked.park(executor, job_id, for_run=for_run, task=task)
        return row, row is None and parked.send_again(executor, job_id, for_run=for_run, task=task)

    row, again = runtime.connections.transact("park", work)
    if again:
        logger.warning(
            "Job %d is sent again: this worker does not know its task %s, and another worker of its queue does",
            job_id, task,
        )  # fmt: skip
    if row is None:
        return
    runtime.observer.tell(JobParked(job_id, task, row.queue))
    if row.terminating:
        logger.warning(
            "Job %d (%s) is terminated without its shutdown in %g seconds, unless a worker comes to know the task.",
            job_id, task, parked.SHUTDOWN_WAITS_S,
        )  # fmt: skip


def serve(executor: Transaction, worker_id: int, *, queues: Sequence[str], tasks: Sequence[str]) -> int:
    """Record what a worker serves, and release the jobs that are parked for it; returns how many.

    It is one transaction: whoever parks a job after it sees the worker, and whoever has parked one before is seen.
    """
    parked.take_turn(executor)
    served.serve(executor, worker_id, queues=queues, tasks=tasks)
    return parked.release(executor, queues=queues, tasks=tasks)
