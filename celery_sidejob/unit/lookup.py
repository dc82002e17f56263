"""Finding a job by its id or an alias, as the run in progress here sees it."""

from __future__ import annotations

from typing import Any

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
    unit = active()
    reader: Reader = transaction if transaction is not None else runtime.connections
    if isinstance(id_or_alias, str) and why_not_storable(id_or_alias):  # nor could Python read so long a number
        return None
    if isinstance(id_or_alias, str) and not id_or_alias.isdecimal():
        if unit is not None:
            given, taken = unit.aliases()
            if id_or_alias in given:
                return given[id_or_alias], None
            if id_or_alias in taken:
                return None
        row = jobs.find_by_alias(reader, id_or_alias)
    else:
        if isinstance(id_or_alias, bool) or not isinstance(id_or_alias, int | str):
            raise InvalidValueError(f"A job is found by its id or an alias, not by {id_or_alias!r}.")
        job_id = int(id_or_alias)
        if unit is not None and job_id in unit.new_jobs():
            return job_id, None
        if not -(2**63) <= job_id < 2**63:
            return None
        found = jobs.find(reader, [job_id])
        row = found[0] if found else None
    return None if row is None else (row.id, row)
