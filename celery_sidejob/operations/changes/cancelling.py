"""Cancelling jobs together: one transaction terminates all of them, or none."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.changes import Terminate
from ...store.errors import Moved
from ...store.statement import Reader, Transaction
from ..runtime import Runtime
from .dependencies import check_no_dependents, with_dependents
from .follow_up import follow_up
from .unit_of_work import Applied


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
