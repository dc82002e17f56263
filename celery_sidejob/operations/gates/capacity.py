"""Capacity pools: the transaction that makes a job or task admits it, or refuses it before anything is written."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ...model.capacity import Admission, PoolSpec, parts_of
from ...model.changes import NewJob
from ...model.durable import Message
from ...model.errors import InvalidValueError, PoolConflictError, StoreUnavailableError
from ...model.logger import logger
from ...store import capacity
from ...store.borrowed.borrowed import Borrowed
from ...store.connection.connections import Connections
from ...store.statement import Reader, Transaction
from ...store.write_behind import WriteBehind
from ..hold import BeginsAgainError
from ..runtime import Runtime
from . import queues

Work = TypeVar("Work", NewJob, Message)

REFUSALS_S = 1.0
"""Seconds within which a refusal is counted in the totals."""
RUNG_TOGETHER = 100
"""How many messages a process that has freed slots publishes at once."""
SOONEST_S, LATEST_S = 1.0, 60.0
"""The bounds of `retry_after`."""


_made: WeakKeyDictionary[Connections, set[PoolSpec]] = WeakKeyDictionary()
"""The pools that this process knows to exist."""


class PoolFullError(Exception):
    """A pool has no room for a work: nothing was written. The caller turns it into `Overloaded`."""

    def __init__(self, admission: Admission) -> None:
        super().__init__(admission.pool.name)
        self.admission = admission


class PoolFilledError(BeginsAgainError):
    """A pool has filled up since a run was told that it had room."""

    def __init__(self, admission: Admission) -> None:
        super().__init__(f"Capacity pool {admission.pool.name!r} has filled up meanwhile.")


def admit(executor: Transaction, works: Sequence[Work]) -> list[Work]:
    """Take the slots of works that are admitted now, all or none, and return the works with their slots.

    The caller makes the works in the same transaction. Raises PoolFullError, PoolConflictError, and InvalidValueError
    for a work that would not fit into an empty pool. A pool that does not exist yet is made.

    A borrowed transaction locks no row of a pool, because it may stay open for long: its works take their slots at its
    commit, and wait if they find none.
    """
    wanted: dict[str, dict[str, Admission]] = defaultdict(dict)
    for work in works:
        if (admission := judged(work)) is not None:
            wanted[admission.pool.name][work.task_id] = admission
    slots: dict[str, int] = {}
    for _, admissions in sorted(wanted.items()):
        if isinstance(executor, Borrowed):
            slots |= _check_rooms(executor, admissions)
        elif len(admissions) == 1:
            slots |= _admit_one(executor, admissions)
        else:
            slots |= _admit_many(executor, admissions)
    return [replace(work, slot=slots[work.task_id]) if work.task_id in slots else work for work in works]


def judged(work: NewJob | Message) -> Admission | None:
    """Return the admission of a work whose slots are judged by the transaction that makes it; None for others."""
    return work.admission if work.admission is not None and work.admission.is_judged else None


def prepare(runtime: Runtime, admissions: Iterable[Admission | None], *, lent: bool = False) -> None:
    """Make the pools of works that are not judged, once in a process: their rows count only in an existing pool.

    With `lent` the pools of all works are made, because a pool made in a borrowed transaction would make other callers
    wait. Never raises for a pool: no work that follows another may be lost because of it.
    """
    made = _made.setdefault(runtime.connections, set())
    for admission in admissions:
        if admission is None or (admission.is_judged and not lent):
            continue
        pool = admission.pool
        if pool.limit is None or pool in made:
            continue
        try:
            runtime.connections.transact("declare", partial(ensure, pool=pool))
            made.add(pool)
        except PoolConflictError as error:
            logger.warning("%s", error)
            made.add(pool)
        except StoreUnavailableError:
            return  # the next write will report it


def check_room(executor: Reader, admission: Admission, *, pending: int = 0) -> None:
    """Raise PoolFullError if a pool has no room now for a work beside `pending` slots of others; takes no slot."""
    if not admission.refuses:
        return
    row = capacity.read(executor, admission.pool.name)
    if row is not None:  # otherwise it is made, empty, by the transaction that makes the work
        _check_room(admission, row, pending)


@contextmanager
def refusing(runtime: Runtime) -> Iterator[None]:
    """Raise `Overloaded` if a pool refuses the work that is made in the block."""
    try:
        yield
    except PoolFullError as full:
        raise refusal(runtime, full) from None


def refusal(runtime: Runtime, full: PoolFullError) -> Exception:
    """Return the error that tells how full a pool is and when to try again, and count the refusal."""
    pool = full.admission.pool
    row = runtime.connections.read(lambda executor: capacity.read(executor, pool.name))
    refusals = runtime.connections.write_behind(
        "refusals", lambda: WriteBehind("refusals of capacity pools", partial(_count, runtime), within_s=REFUSALS_S)
    )
    refusals.add([pool.name])
    if row is None:
        return runtime.tasks.overloaded(pool.name, limit=0, used=0, retry_after=LATEST_S)
    retry_after = _retry_after(full.admission.weight, row)
    return runtime.tasks.overloaded(pool.name, limit=row.capacity, used=row.used, retry_after=retry_after)


def ring(runtime: Runtime, pools: Iterable[str | None]) -> None:
    """Publish the works that got slots of these pools by a commit of this process; never raises for the store.

    The sweeper publishes those that are not published here.
    """
    names = sorted({pool for pool in pools if pool is not None})
    if names:
        runtime.after_commit(partial(_ring, runtime, names))


def fill(runtime: Runtime) -> int:
    """Admit works that wait although slots are free: their time has come, or a lock was in the way.

    Returns how many pools had such works.
    """
    names = capacity.fillable(runtime.connections)
    for name in names:
        runtime.connections.transact("fill", partial(capacity.fill, name=name))
    if names:
        _ring(runtime, names)
    return len(names)


def resize(runtime: Runtime, pool: PoolSpec, limit: int) -> None:
    """Give a pool another limit, at once; works that hold slots keep them."""

    def work(executor: Transaction) -> None:
        row = ensure(executor, pool)
        capacity.lock(executor, pool.name)
        if limit < row.shards:
            raise InvalidValueError(
                f"Capacity pool {pool.name!r} has {row.shards} shards and cannot have {limit} slots: a shard needs one "
                "slot at least."
            )
        capacity.resize(executor, pool.name, limit=limit, parts=parts_of(limit, row.shards))
        capacity.fill(executor, pool.name)

    runtime.connections.transact("resize", work)
    ring(runtime, [pool.name])


# --------------------------------------------------------------------------------------------------------------------


def _ring(runtime: Runtime, names: Sequence[str]) -> None:
    try:
        rows = runtime.connections.read(partial(capacity.let_in, names=names, limit=RUNG_TOGETHER))
        queues.publish(runtime, rows)
    except StoreUnavailableError as error:
        logger.warning("The sweeper publishes what has got slots of %s: %s", ", ".join(names), error)


def _admit_one(executor: Transaction, wanted: Mapping[str, Admission]) -> dict[str, int]:
    """Take the slots of a work, {task id: admission}; returns {task id: shard}."""
    ((task_id, admission),) = wanted.items()
    pool = admission.pool
    shards = pool.shards
    while True:
        row = capacity.admit(
            executor,
            pool.name,
            weight=admission.weight,
            refuses=admission.refuses,
            first_shard=_first_shard(shards),
            shards=shards,
        )
        if row is None:
            ensure(executor, pool)
            continue
        _check_alike(pool, row)
        if row.slot is not None:
            return {task_id: int(row.slot)}
        _check_fits(admission, row)
        if not row.had_room:
            raise PoolFullError(admission)


def _admit_many(executor: Transaction, wanted: Mapping[str, Admission]) -> dict[str, int]:
    """Take the slots of several works of one pool, in the same way."""
    admissions = list(wanted.values())
    pool = admissions[0].pool
    row = ensure(executor, pool)
    needed = sum(admission.weight for admission in admissions if admission.refuses)
    for admission in admissions:
        _check_fits(admission, row)
    if needed and needed > row.capacity - row.used:  # only read, so that a refused caller locks nothing
        raise PoolFullError(admissions[-1])
    rooms = {row.shard: row.capacity - row.used for row in capacity.lock(executor, pool.name)}
    start = _first_shard(row.shards)
    order = [(start + place) % row.shards for place in range(row.shards)]
    taken: dict[int, tuple[int, int]] = {}
    slots: dict[str, int] = {}
    for task_id, admission in wanted.items():
        found = next((shard for shard in order if rooms[shard] >= admission.weight), None)
        if found is None and admission.refuses:
            raise PoolFullError(admission)
        shard = found if found is not None else max(order, key=lambda shard: rooms[shard])
        rooms[shard] -= admission.weight
        weight, count = taken.get(shard, (0, 0))
        taken[shard] = weight + admission.weight, count + 1
        slots[task_id] = shard
    capacity.take(executor, pool.name, taken)
    return slots


def ensure(executor: Transaction, pool: PoolSpec) -> Any:
    """Return the row of a pool; make it if there is none. Raises PoolConflictError if it is declared otherwise."""
    row = capacity.read(executor, pool.name)
    if row is None:
        if pool.limit is None:
            raise InvalidValueError(
                f"Capacity pool {pool.name!r} does not exist yet, and its declaration is not in this process: start a "
                "worker that serves the task, or import its module here."
            )
        capacity.declare(
            executor, pool.name, limit=pool.limit, covers=pool.covers, parts=parts_of(pool.limit, pool.shards)
        )
        row = capacity.read(executor, pool.name)
    _check_alike(pool, row)
    return row


def _check_alike(pool: PoolSpec, row: Any) -> None:
    """Compare a declaration with the pool, whose limit is the first declared one or the last one set by a resize."""
    if pool.limit is None:
        return
    if pool.limit in (row.declared, row.capacity) and (pool.shards, pool.covers) == (row.shards, row.covers):
        return
    resized = "" if row.declared == row.capacity else f" (now {row.capacity})"
    raise PoolConflictError(
        f"Capacity pool {pool.name!r} is declared with limit {pool.limit}, shards {pool.shards} and covers "
        f"{pool.covers!r}, but exists with limit {row.declared}{resized}, shards {row.shards} and covers "
        f"{row.covers!r}. Give it another name, or call resize({pool.limit}) with the declaration that exists, and "
        "change the code then."
    )


def _check_room(admission: Admission, row: Any, pending: int) -> None:
    _check_fits(admission, row)
    if row.room < admission.weight or row.used + pending + admission.weight > row.capacity:
        raise PoolFullError(admission)


def _check_rooms(borrowed: Borrowed, wanted: Mapping[str, Admission]) -> dict[str, int]:
    """Refuse works of one pool that have no room beside the works that wait, in this transaction or outside.

    Returns the works that take their slots at the commit, full or not, in the same way as `_admit_one`.
    """
    admissions = list(wanted.values())
    row = ensure(borrowed, admissions[0].pool)
    pending = capacity.waiting(borrowed, admissions[0].pool.name, most=row.capacity - row.used)
    for admission in admissions:
        if admission.refuses:
            _check_room(admission, row, pending)
        pending += admission.weight
    return {task_id: capacity.AT_COMMIT for task_id, admission in wanted.items() if not admission.refuses}


def _check_fits(admission: Admission, row: Any) -> None:
    """Refuse a weight that would not fit into an empty pool: trying again would never help."""
    if admission.refuses and row.most is not None and admission.weight > row.most:
        raise InvalidValueError(
            f"weight={admission.weight} does not fit into capacity pool {admission.pool.name!r}: a shard has "
            f"{row.most} slots at most."
        )


def _first_shard(shards: int) -> int:
    """Return the shard where this thread begins to search for room, so that not all callers lock the same row."""
    return hash((os.getpid(), threading.get_ident())) % shards


def _retry_after(weight: int, row: Any) -> float:
    """Return the seconds until so many slots are likely to be free, estimated from the slots freed lately."""
    freed = row.freed - row.freed_before
    if freed <= 0:
        return LATEST_S
    soon = weight * max(float(row.window_s), SOONEST_S) / int(freed)
    return round(min(LATEST_S, max(SOONEST_S, soon)), 1)


def _count(runtime: Runtime, names: Iterable[str]) -> None:
    runtime.connections.transact("refusals", lambda executor: capacity.count_refusals(executor, names), single=True)
