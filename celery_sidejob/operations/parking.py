"""Parks jobs whose task no worker of their queue knows, and releases them once a worker knows the task."""

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

    def work(executor: Transaction) -> tuple[Any | None, float | None]:
        jobs.lock(executor, [job_id])  # otherwise a termination that is not committed would not see that it is parked
        parked.take_turn(executor)
        row = parked.park(executor, job_id, for_run=for_run, task=task)
        if row is not None:
            return row, None
        return None, parked.send_again(executor, job_id, for_run=for_run, lost_after_s=runtime.settings.lost_after)

    row, wait_s = runtime.connections.transact("park", work)
    if row is None:
        _tell_of_message(job_id, task, wait_s)
        return
    runtime.observer.tell(JobParked(job_id, task, row.queue))
    if row.terminating:
        logger.warning(
            "Job %d (%s) is terminated without its shutdown in %g seconds, unless a worker comes to know the task.",
            job_id, task, parked.SHUTDOWN_WAITS_S,
        )  # fmt: skip


def _tell_of_message(job_id: int, task: str, wait_s: float | None) -> None:
    """Say what becomes of a message whose job is not parked: None if the run that it announces is not owed now."""
    if wait_s is None:
        logger.info(
            "A message of job %d (%s) is dropped: this worker does not know the task, and the run that it announces is "
            "not owed, or has begun. Nothing is lost, and there is nothing to do.", job_id, task,
        )  # fmt: skip
        return
    logger.warning(
        "Job %d (%s) is not run here: this worker does not know the task, but another of its queue does. Nothing is "
        "lost: its message is sent again in %.0f seconds, to any of them. To avoid this, start this worker with the "
        "code of the task, or give the task a queue of its own.", job_id, task, wait_s,
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
