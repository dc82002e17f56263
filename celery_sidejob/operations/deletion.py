"""Deleting jobs. Asking and terminating are changes like any other (`unit_of_work`)."""

from __future__ import annotations

from collections.abc import Set

from ..model.errors import JobNotFoundError
from ..model.status import Status
from ..store import askings, jobs, messages
from ..store.errors import Moved, RowsLocked
from ..store.statement import Executor
from .runtime import Runtime


def delete(runtime: Runtime, job_id: int) -> bool:
    """Delete a job and everything below it if all are terminated; otherwise change nothing and return False.

    Terminated jobs are in no run and have no message, so a delete that succeeds has no live run; later deliveries
    and zombies find no row.
    """

    return _delete(runtime, job_id, frozenset({Status.TERMINATED}))


def delete_finished(runtime: Runtime, job_id: int, statuses: Set[str]) -> bool:
    """Delete a job and everything below it if all rest in `statuses` and nothing is still to happen to any.

    A result that the backend does not have yet is still to come: a chord or an errback may wait for it.
    """
    try:
        return _delete(runtime, job_id, statuses, with_results=False)
    except (JobNotFoundError, RowsLocked):  # somebody was quicker, or looks at it just now
        return False


def _delete(runtime: Runtime, job_id: int, statuses: Set[str], *, with_results: bool = True) -> bool:
    def work(executor: Executor) -> bool:
        before = {row.id for row in jobs.subtree(executor, [job_id])}
        if not before:
            raise JobNotFoundError(f"There is no job {job_id}: it was deleted, or never committed.")
        locked = jobs.lock_exclusively(executor, before)
        if {row.id for row in jobs.subtree(executor, [job_id])} != before or locked.keys() != before:
            raise Moved("children came or went before the subtree was locked")
        if any(row.status not in statuses for row in locked.values()) or messages.pending(executor, before):
            return False
        if not with_results and askings.any_unsent(executor, before):
            return False
        jobs.delete(executor, before)
        return True

    return runtime.connections.transact("delete", work)
