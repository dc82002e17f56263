"""Making jobs from drafts: `create` writes them in one transaction or not at all.

Unique keys decide which jobs are made, and which open jobs are used or replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from ..model.changes import Change, NewJob, Terminate
from ..model.errors import (
    AliasTakenError,
    ChildNameTakenError,
    IllegalMoveError,
    InvalidValueError,
    StoreUnavailableError,
)
from ..model.names import child_name_taken
from ..operations.after_commit import AfterCommit, follow
from ..operations.changes.unique_keys import KeysTakenError, is_replaced
from ..operations.gates import capacity
from ..operations.runtime import Runtime
from ..store import asks, jobs
from ..store.errors import NoAnswer, OutcomeUnknown
from ..store.statement import Transaction
from ..unit.open_unit import OpenUnit, active, submit


def create(runtime: Runtime, drafts: Sequence[NewJob], transaction: Any = None) -> Sequence[NewJob | int]:
    """Create drafted jobs, all or none: in the run's unit, the caller's transaction or one of ours.

    Returns them with their ids, in order. If an open job already has a draft's unique key, its id is returned instead.
    """
    if not drafts:
        return ()
    lent = transaction is not None or active() is not None
    are_plain = not lent and all(map(_is_plain, drafts))
    if are_plain and all(new.admission is None for new in drafts):
        return _until_known(runtime, drafts, partial(_create_plain, runtime, drafts))
    _check_names_among(first_of_each(drafts))
    capacity.prepare(runtime, [new.admission for new in drafts], lent=lent)
    with capacity.refusing(runtime):
        if are_plain:
            is_judged = any(map(capacity.judged, drafts))
            return _until_known(runtime, drafts, partial(_create_plain, runtime, drafts, is_judged=is_judged))
        if any(new.unique is not None for new in drafts):
            return _create_unique(runtime, drafts, transaction)
        return _create(runtime, drafts, transaction)


def _create(runtime: Runtime, drafts: Sequence[NewJob], transaction: Any) -> Sequence[NewJob]:
    unit = active() if transaction is None else None
    if transaction is not None:
        _check_child_names(transaction, drafts)
    if unit is not None:
        _check_room(runtime, unit, drafts)
    made = _numbered(drafts, jobs.next_ids(transaction or runtime.connections, len(drafts)))
    changes: list[Change] = [*made, *(Terminate(new.replaces) for new in made if new.replaces is not None)]

    def make() -> Sequence[NewJob]:
        submit(runtime, "enqueue", *changes, transaction=transaction)
        return made

    return make() if unit is not None or transaction is not None else _until_known(runtime, drafts, make)


def _numbered(drafts: Sequence[NewJob], ids: Iterable[int]) -> list[NewJob]:
    return [new.but(id=job_id) for new, job_id in zip(drafts, ids, strict=True)]


def _is_plain(new: NewJob) -> bool:
    """Tell whether one statement can make such jobs, however many, without BEGIN, COMMIT or a lock."""
    return new.parent_id is None and not (
        new.ports or new.aliases or new.state or new.tags or new.unique or new.depends_on or new.batch
    )


def _check_room(runtime: Runtime, unit: OpenUnit, drafts: Sequence[NewJob]) -> None:
    """Refuse a job at the call, inside a run, if its pool is full now; the commit takes the slots."""
    judged = [admission for admission in map(capacity.judged, drafts) if admission is not None]
    if not judged:
        return
    pending = Counter[str]()
    for new in unit.seen.new_jobs().values():
        if (admission := capacity.judged(new)) is not None:
            pending[admission.pool.name] += admission.weight
    for admission in judged:
        capacity.check_room(runtime.connections, admission, pending=pending[admission.pool.name])
        pending[admission.pool.name] += admission.weight


def _create_plain(runtime: Runtime, drafts: Sequence[NewJob], *, is_judged: bool = False) -> list[NewJob]:
    """Create plain jobs, and return them with their ids, which grow in their order."""

    def work(executor: Transaction) -> Sequence[Any]:
        admitted = capacity.admit(executor, drafts) if is_judged else drafts
        return jobs.insert(executor, admitted, check_interval_s=runtime.settings.lost_after)

    rows = runtime.connections.transact("enqueue", work, single=not is_judged)
    made = [new.but(id=row.job_id) for new, row in zip(drafts, rows, strict=True)]
    after_commit = AfterCommit()
    for new, row in zip(made, rows, strict=True):
        after_commit.created(new, row)
    follow(runtime, after_commit)
    if after_commit.pools:
        capacity.ring(runtime, after_commit.pools)
    return made


def _until_known(runtime: Runtime, drafts: Sequence[NewJob], make: Callable[[], Sequence[NewJob]]) -> Sequence[NewJob]:
    """Make jobs; if the answer was lost, try again. Their task ids are unique, so no job is made twice.

    If the first commit is still in progress, the second try waits for it at the primary keys. Raises the first error if
    the store stays unreachable: then it is unknown whether the jobs were made. If so, they run.
    """
    try:
        return make()
    except NoAnswer:
        raise  # a second failure would have nothing to add
    except OutcomeUnknown as unknown:
        try:
            return make()
        except StoreUnavailableError:
            raise unknown from None
        except Exception:
            made = asks.jobs_of(runtime.connections, [new.task_id for new in drafts])
            if len(made) < len(drafts):
                raise
            return _numbered(drafts, [made[new.task_id] for new in drafts])


def _check_names_among(drafts: Sequence[NewJob]) -> None:
    """Refuse names that two of the new jobs have in common."""
    children = Counter((new.parent_id, new.name) for new in drafts if new.name is not None)
    for (parent_id, child), times in children.items():
        if times > 1:
            raise ChildNameTakenError(f"{times} new children of job {parent_id} want to be {child!r}; name them apart.")
    for alias, times in Counter(alias for new in drafts for alias in new.aliases).items():
        if times > 1:
            raise AliasTakenError(f"{times} new jobs want the alias {alias!r}; it can belong to one of them.")


def _check_child_names(executor: Transaction, drafts: Iterable[NewJob]) -> None:
    """Check names before writing into a borrowed transaction: an error of Postgres would abort it."""
    for new in drafts:
        if new.parent_id is None or new.name is None:
            continue
        if jobs.child(executor, new.parent_id, new.name) is not None:
            raise child_name_taken((new.parent_id, new.name))


# -- unique keys -------------------------------------------------------------------------------------------------------


def _create_unique(runtime: Runtime, drafts: Sequence[NewJob], transaction: Any) -> Sequence[NewJob | int]:
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
            made = {new.task_id: new for new in (_create(runtime, wanted, transaction) if wanted else ())}
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
        new.unique.key: SimpleNamespace(job_id=new.id, waits=False)
        for new in unit.seen.new_jobs().values()
        if new.unique
    }
    return {row.key: row for row in asks.key_holders(runtime.connections, keys)} | own
