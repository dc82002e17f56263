"""Why jobs do not run now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..model.checks import shown
from ..model.errors import InvalidValueError
from ..store import registry, waiting, workers
from ..store.statement import Transaction
from .runtime import LocalRuntime, Runtime

NO_WORKER = "no worker"
REASONS = ("dependencies", "timer", "retry", "pause", "limit", "rate", "pool", "room", NO_WORKER)
"""The reasons why a job's next run may not begin, in the order in which they are reported."""


def check_reason(reason: Any) -> None:
    """Raise InvalidValueError if this is no reason."""
    if reason not in REASONS:
        raise InvalidValueError(f"waiting_for is one of {', '.join(REASONS)}; not {shown(reason)}.")


def waiting_for(runtime: Runtime, job_id: int) -> list[str] | None:
    """Return the reasons why a job's next run does not begin; none if it may, is in progress, or is not owed.

    A reason is `dependencies`, `timer`, `retry`, `pause`, `limit`, `rate`, `pool`, `room` or `no worker`. Dependencies:
    other jobs have not completed. Pool: it has no slot of its capacity pool. Room: the last run has written to a full
    port, and a run is owed when its reader has made room. No worker: the job is parked, or its run is due and no live
    worker of its queue knows the task; a starting worker that has not recorded its tasks yet counts as knowing the
    task. Returns None if there is no such job.
    """
    return runtime.connections.transact("inspect", lambda executor: reasons(executor, runtime, [job_id])).get(job_id)


def is_parked(runtime: Runtime, job_id: int) -> bool:
    """Tell whether a job is parked: no worker of its queue knew its task when its message came."""
    return any(row.is_parked for row in waiting.conditions(runtime.connections, [job_id]))


def reasons(executor: Transaction, runtime: LocalRuntime, job_ids: Iterable[int]) -> dict[int, list[str]]:
    """Return the result of `waiting_for` for each job, as the transaction sees it; a job that is gone is missing."""
    rows = waiting.conditions(executor, job_ids)
    due = {(row.task, row.queue) for row in rows if row.is_due}
    silent = workers.silent(executor, runtime.settings) if due else []
    served = {one: registry.serves(executor, *one, silent) for one in due}
    starting = not all(served.values()) and bool(registry.unannounced(executor, silent))
    return {row.id: _reasons(row, is_served=starting or served.get((row.task, row.queue), True)) for row in rows}


def _reasons(row: Any, *, is_served: bool) -> list[str]:
    found = [reason for reason in REASONS if reason != NO_WORKER and getattr(row, f"waits_for_{reason}")]
    return [*found, NO_WORKER] if row.is_parked or (row.is_due and not is_served) else found
