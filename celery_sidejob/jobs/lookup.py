"""The jobs that a caller names by id, alias or handle, as the run in progress here sees them; also as dependencies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from ..model.changes import DependOn, OnFailure
from ..model.checks import shown
from ..model.errors import InvalidValueError, JobNotFoundError
from ..model.names import why_not_storable
from ..operations.changes import dependencies
from ..operations.runtime import Runtime
from ..store import jobs as rows
from ..store.statement import Reader, Transaction
from ..unit.open_unit import OpenUnit, active

HOW = ("wait", "fail", "run")


def locate(
    runtime: Runtime, id_or_alias: int | str, transaction: Transaction | None = None
) -> tuple[int, Any | None] | None:
    """Return the job's id with its row (None where only this unit knows the job); None only if there is no such job.

    `transaction` may be the caller's transaction, in which the job was made.
    """
    reader: Reader = transaction if transaction is not None else runtime.connections
    if isinstance(id_or_alias, str) and why_not_storable(id_or_alias):  # nor could Python read so long a number
        return None
    if isinstance(id_or_alias, str) and not id_or_alias.isdecimal():
        return _by_alias(reader, id_or_alias)
    if isinstance(id_or_alias, bool) or not isinstance(id_or_alias, int | str):
        raise InvalidValueError(f"A job is found by its id or an alias, not by {shown(id_or_alias)}.")
    return _by_id(reader, int(id_or_alias))


def _by_alias(reader: Reader, alias: str) -> tuple[int, Any | None] | None:
    unit = active()
    if unit is not None:
        given, taken = unit.seen.aliases()
        if alias in given:
            return given[alias], None
        if alias in taken:
            return None
    row = rows.find_by_alias(reader, alias)
    return None if row is None else (row.id, row)


def _by_id(reader: Reader, job_id: int) -> tuple[int, Any | None] | None:
    unit = active()
    if unit is not None and job_id in unit.seen.new_jobs():
        return job_id, None
    if not -(2**63) <= job_id < 2**63:
        return None
    found = rows.find(reader, [job_id])
    return (found[0].id, found[0]) if found else None


# -- dependencies ------------------------------------------------------------------------------------------------------


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
