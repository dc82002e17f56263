"""The `depends_on` of calls: checks the jobs that a caller names, and shows them to a run before its commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from ..model.changes import Change, DependOn, NewJob, OnFailure, Undepend
from ..model.checks import shown
from ..model.errors import InvalidValueError, JobNotFoundError
from ..operations.changes import dependencies
from ..operations.runtime import Runtime
from ..store.statement import Transaction
from ..unit.lookup import locate
from ..unit.open_unit import OpenUnit

HOW = ("wait", "fail", "run")


def edges_of(
    runtime: Runtime, depends_on: Any, on_failure: str | None, executor: Transaction | None = None
) -> tuple[tuple[int, OnFailure], ...]:
    """Return the dependencies of a new job: (job id, effect of that job's failure), each job once."""
    if on_failure is not None and not depends_on:
        raise InvalidValueError("on_failure= says what happens if another job fails: name that job in depends_on=.")
    if isinstance(depends_on, str) or not isinstance(depends_on, Iterable):
        raise InvalidValueError(f"depends_on= takes a list of jobs, ids or aliases, not {shown(depends_on)}.")
    how = check_on_failure("wait" if on_failure is None else on_failure)
    return tuple((job_id, how) for job_id in ids_of(runtime, depends_on, executor))


def check_on_failure(on_failure: Any) -> OnFailure:
    """Return the effect of a dependency's failure, or raise InvalidValueError."""
    if on_failure not in HOW:
        raise InvalidValueError(f"on_failure is 'wait', 'fail' or 'run', not {shown(on_failure)}.")
    return cast(OnFailure, on_failure)


def ids_of(runtime: Runtime, jobs: Iterable[Any], executor: Transaction | None = None) -> tuple[int, ...]:
    """Return the ids of jobs, ids and aliases, each once. Ids of deleted jobs are returned too; an alias must exist."""
    found: dict[int, None] = {}
    for job in jobs:
        own_id = getattr(job, "id", None)
        job_id = own_id if isinstance(own_id, int) else job  # a Celery result has an id too, a text
        if isinstance(job_id, str) and not job_id.isdecimal():
            there = locate(runtime, job_id, executor)
            if there is None:
                raise JobNotFoundError(f"There is no job {job_id!r}: no job has this alias.")
            job_id = there[0]
        if isinstance(job_id, bool) or not isinstance(job_id, int | str):
            raise InvalidValueError(f"A job to wait for is a job, an id or an alias, not {shown(job)}.")
        if 0 < int(job_id) < 2**63:
            found[int(job_id)] = None
    return tuple(found)


def check_in_run(runtime: Runtime, unit: OpenUnit, change: DependOn, row: Any) -> None:
    """Refuse a dependency at the call, inside a run, rather than at the run's commit."""
    dependencies.check_waits(row)
    pending = {each.id: [on for on, _ in each.depends_on] for each in unit.seen.new_jobs().values()}
    for each in unit.changes:
        if isinstance(each, DependOn):
            pending[each.job_id] = [*pending.get(each.job_id, ()), *each.on]
    dependencies.check_cycle(runtime.connections, change.job_id, change.on, pending)


def pending_edges(changes: Sequence[Change], stored: Iterable[int], job_id: int) -> list[int]:
    """Return the ids of the jobs for which a job waits, as the changes of a unit will leave them."""
    found = dict.fromkeys(stored)
    for change in changes:
        if isinstance(change, NewJob) and change.id == job_id:
            found |= dict.fromkeys(on for on, _ in change.depends_on)
        elif isinstance(change, DependOn) and change.job_id == job_id:
            found |= dict.fromkeys(change.on)
        elif isinstance(change, Undepend) and change.job_id == job_id:
            found = {on: None for on in found if change.on is not None and on not in change.on}
    return sorted(found)
