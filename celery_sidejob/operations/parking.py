"""Parking jobs whose task no worker of their queue knows, and releasing them when a worker comes to know it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..model.events import JobParked
from ..store import jobs, parked, served
from ..store.statement import Transaction
from .runtime import Runtime

logger = logging.getLogger("celery_sidejob")


def park(runtime: Runtime, job_id: int, *, for_run: int, task: str) -> None:
    """Park a job whose message a worker has received that does not know its task.

    It is not parked if a live worker of the queue knows the task: the message is then sent again within seconds. If the
    process dies before the commit, the message counts as missing and is sent again too.
    """

    def work(executor: Transaction) -> Any | None:
        jobs.lock(executor, [job_id])  # otherwise a termination that is not committed would not see that it is parked
        parked.take_turn(executor)
        row = parked.park(executor, job_id, for_run=for_run, task=task)
        if row is None:
            parked.send_again(executor, job_id, for_run=for_run, lost_after_s=runtime.settings.lost_after)
        return row

    row = runtime.connections.transact("park", work)
    if row is None:
        logger.warning(
            "Job %d (%s) is not run here: this worker does not know the task. Its message is sent again if it is still "
            "wanted.", job_id, task,
        )  # fmt: skip
        return
    runtime.observer.tell(JobParked(job_id, task, row.queue))
    if row.terminating:
        logger.warning(
            "Job %d (%s) is terminated without its shutdown in %g seconds, unless a worker comes to know the task.",
            job_id, task, parked.SHUTDOWN_WAITS_S,
        )  # fmt: skip


def serve(executor: Transaction, worker_id: int, *, queues: Sequence[str], tasks: Sequence[str]) -> Any:
    """Record what a worker serves, and release the first of the jobs that are parked for it.

    It is one transaction: a later parking sees this worker, and this worker sees every earlier parking.
    Returns how many `jobs` were released, and whether it `goes_on`: call it again for the next. If the process dies
    before that, another worker that serves the task releases them, or this one's successor.
    """
    parked.take_turn(executor)
    served.serve(executor, worker_id, queues=queues, tasks=tasks)
    return parked.release(executor, queues=queues, tasks=tasks)
