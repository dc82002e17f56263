"""Cancelling jobs together: all of them are terminated in one transaction, or none is."""

from __future__ import annotations

from collections.abc import Sequence

from ..model.changes import Terminate
from ..store.errors import Moved
from ..store.statement import Reader, Transaction
from .dependencies import check_no_dependents, with_dependents
from .follow_up import follow_up
from .runtime import Runtime
from .unit_of_work import Applied


def to_cancel(executor: Reader, job_ids: Sequence[int], *, dependents: bool) -> list[int]:
    """Return the ids of the jobs that are to be terminated; raises HasDependentsError if others depend on them."""
    if dependents:
        return sorted(with_dependents(executor, job_ids))
    check_no_dependents(executor, job_ids)
    return sorted(set(job_ids))


def cancel(runtime: Runtime, job_ids: Sequence[int], *, dependents: bool) -> list[int]:
    """Terminate jobs, with `dependents` also all that wait for them; returns the ids of all. All, or none.

    Raises HasDependentsError, and JobNotFoundError for a job that is not there. Who is made to depend on one of them
    while this is in progress waits for a job that is terminating, as if it had come afterwards.
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
