"""Finding a job by its id or an alias, as the run in progress here sees it."""

from __future__ import annotations

from typing import Any

from ..model.checks import shown
from ..model.errors import InvalidValueError
from ..model.names import why_not_storable
from ..operations.runtime import Runtime
from ..store import jobs
from ..store.statement import Reader, Transaction
from .open_unit import active


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
    row = jobs.find_by_alias(reader, alias)
    return None if row is None else (row.id, row)


def _by_id(reader: Reader, job_id: int) -> tuple[int, Any | None] | None:
    unit = active()
    if unit is not None and job_id in unit.seen.new_jobs():
        return job_id, None
    if not -(2**63) <= job_id < 2**63:
        return None
    found = jobs.find(reader, [job_id])
    return (found[0].id, found[0]) if found else None
