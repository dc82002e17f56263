"""Making jobs with unique keys: the keys decide which jobs are made and which open jobs are used or replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..model.changes import Change, NewJob, Terminate
from ..model.errors import IllegalMoveError, InvalidValueError
from ..operations.changes.unique_keys import KeysTakenError, is_replaced
from ..operations.runtime import Runtime
from ..store import askings
from ..unit.open_unit import OpenUnit, active

Make = Callable[[Sequence[NewJob]], Sequence[NewJob]]
"""Makes jobs, all or none, and returns them with their ids."""


def create_unique(
    runtime: Runtime, drafts: Sequence[NewJob], make: Make, transaction: Any = None
) -> Sequence[NewJob | int]:
    """Make the jobs whose keys no open job has; return for each draft the new job, or the open job's id.

    The keys are judged by the transaction that makes the jobs. If it finds a taken key, it writes nothing, and the jobs
    to be made are chosen again. In a run the keys are judged now by the committed jobs, and again by the run's commit:
    if another job has taken a key meanwhile, the run begins again. Raises DuplicateError if a draft asks for it.
    """
    unit = active() if transaction is None else None
    left = first_of_each(drafts)
    found: dict[str, int] = {}
    taken: Mapping[str, Any] = {} if unit is None else _holders(runtime, unit, left)
    while True:
        left = [_judged(new, taken, found, transaction) for new in left]
        wanted = [new for new in left if new.unique is None or new.unique.key not in found]
        try:
            made = {new.task_id: new for new in (make(wanted) if wanted else ())}
            break
        except KeysTakenError as error:
            taken = error.holders
    of_key: dict[str, NewJob | int] = {**found}
    of_key.update({new.unique.key: new for new in made.values() if new.unique is not None})
    return [made[new.task_id] if new.unique is None else of_key[new.unique.key] for new in drafts]


def first_of_each(drafts: Sequence[NewJob]) -> list[NewJob]:
    """Leave out drafts that use the job of an earlier draft with the same key."""
    first: dict[str, NewJob] = {}
    left = []
    for new in drafts:
        if new.unique is None or first.setdefault(new.unique.key, new) is new:
            left.append(new)
        elif new.unique.on_duplicate != "return":
            raise InvalidValueError(
                f"Two of the new jobs have the unique key {new.unique.key!r}: the second may only have "
                "on_duplicate='return', which uses the first."
            )
    return left


def with_the_replaced(made: Sequence[NewJob]) -> Sequence[Change]:
    """Return the changes that make these jobs and terminate the jobs that they replace."""
    return [*made, *(Terminate(new.replaces) for new in made if new.replaces is not None)]


def _judged(new: NewJob, taken: Mapping[str, Any], found: dict[str, int], transaction: Any) -> NewJob:
    """Judge a draft whose key is taken: note the open job as `found`, or return the draft that replaces it."""
    if new.unique is None:
        return new
    holder = taken.get(new.unique.key)
    if holder is None:
        return replace(new, replaces=None)
    if not is_replaced(new.unique, holder):
        found[new.unique.key] = holder.job_id
        return new
    if transaction is not None:
        raise IllegalMoveError(
            f"Job {holder.job_id} has the unique key {new.unique.key!r}, and on_duplicate='replace' cannot be part of "
            "transaction=: it would lock that job until your commit. Call it before or after your transaction."
        )
    return replace(new, replaces=holder.job_id)


def _holders(runtime: Runtime, unit: OpenUnit, drafts: Sequence[NewJob]) -> dict[str, Any]:
    """Return the jobs that have the keys of drafts, as this unit leaves the store; it cannot replace its own jobs."""
    keys = [new.unique.key for new in drafts if new.unique is not None]
    own = {
        new.unique.key: SimpleNamespace(job_id=new.id, waits=False) for new in unit.new_jobs().values() if new.unique
    }
    return {row.key: row for row in askings.key_holders(runtime.connections, keys)} | own
