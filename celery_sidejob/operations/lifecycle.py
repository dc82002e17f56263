"""Deleting jobs. Asking and terminating are changes like any other (`unit_of_work`)."""

from __future__ import annotations

from ..model.errors import JobNotFoundError
from ..model.status import Status
from ..store import jobs
from ..store.connection import Moved
from ..store.statement import Executor
from .runtime import Runtime


def delete(runtime: Runtime, job_id: int) -> bool:
    """Delete a job and everything below it if all are terminated; otherwise change nothing and return False.

    Terminated jobs are in no run and have no message, so a delete that succeeds has no live run; later deliveries
    and zombies find no row.
    """

    def work(executor: Executor) -> bool:
        before = {row.id for row in jobs.subtree(executor, [job_id])}
        if not before:
            raise JobNotFoundError(f"There is no job {job_id}: it was deleted, or never committed.")
        locked = jobs.lock_exclusively(executor, before)
        if {row.id for row in jobs.subtree(executor, [job_id])} != before or locked.keys() != before:
            raise Moved("children came or went before the subtree was locked")
        if any(row.status != Status.TERMINATED for row in locked.values()):
            return False
        jobs.delete(executor, before)
        return True

    return runtime.connections.transact("delete", work)
