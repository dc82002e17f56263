"""Durable tasks that failed for good, or are revoked: their rows move to the dead set, where a person may revive them.

A row whose task ended well after all is removed instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...model.checks import is_keepable
from ...model.crash_points import reach
from ...model.durable import NOWHERE, Address, Content, Death, Key, Message
from ...model.errors import IllegalMoveError, SchemaError, StoreUnavailableError
from ...model.events import TaskBuried
from ...model.messages import Continuation
from ...model.names import storable
from ...model.protocols import Rider
from ...store.connection.connections import repeat
from ...store.errors import OutcomeUnknown
from ...store.outbox import burials, doorbells, tasks
from ...store.outbox.arming import end_task_runs
from ...store.statement import Transaction
from .. import deduplication
from ..after_commit import publish_and_mark, tell
from ..gates import capacity
from ..runtime import LocalRuntime, Runtime, patiently
from .durable_runs import as_kept


def fail(  # noqa: PLR0913, PLR0915 - which row, why, and by whom; its inner functions count too
    runtime: Runtime,
    key: Key,
    death: Death,
    *,
    by: str,
    worker_id: int | None,
    patient: bool = False,
    unknown: bool = False,
    address: Address = NOWHERE,
    content: Content | None = None,
    riders: Sequence[Rider] = (),
) -> bool:
    """Move a row to the dead set, and report it once; False if it no longer belongs to the caller.

    Also False if the row is in the dead set already, if `address` leads to a copy that counts instead, or if the row
    has another `content` than the delivery that was judged. `unknown`: an earlier try may have moved the row already.
    The commit also makes the writes of `riders`.
    """
    death = replace(death, error=storable(death.error), traceback=death.traceback and storable(death.traceback))
    content = None if content is None else as_kept(runtime, key, content)
    if address.call is not None and not _counts(runtime, key, address, worker_id):
        return False
    noted = deduplication.is_to_be_noted(address)

    def work(executor: Transaction) -> tuple[int, str] | None:
        end = burials.bury(key, death, by=by, worker_id=worker_id, content=content)
        found = end_task_runs(executor, end)
        if found:
            deduplication.note_in(executor, key, address)
        for rider in riders if found else ():
            rider.write(executor)
        return (found[0].id, found[0].task) if found else None

    def once() -> tuple[int, str] | None:
        nonlocal unknown
        try:
            found = runtime.connections.transact(
                "durable-bury", work, single=not (noted or riders), within_s=runtime.patience_s
            )
        except OutcomeUnknown:
            unknown = True
            raise
        if found is None and unknown:  # the first try may have moved it, and its answer was lost
            row = burials.buried(runtime.connections, key)
            return None if row is None else (row.id, row.task)
        return found

    buried = patiently(runtime, once) if patient else repeat(once)
    if buried is None:
        return False
    number, task = buried
    entry_id = entry_id_of(runtime.label, number)
    tell(runtime, TaskBuried(key[0], task, entry_id, death.reason))
    for rider in riders:
        rider.committed()
    return True


def _counts(runtime: Runtime, key: Key, address: Address, worker_id: int | None) -> bool:
    """Tell whether the row still exists and counts before any copy of it in another store."""
    row = tasks.read(runtime.connections, key[0])
    if row is None or row.generation != key[1]:
        return False
    return not deduplication.gives_way(runtime, key, address, worker_id=worker_id)


def bury_continuation(runtime: Runtime, continuation: Continuation, *, reason: str, error: str) -> bool:
    """Move a continuation to the dead set, and report it once; False if it is gone."""
    bury = partial(doorbells.bury_continuation, continuation=continuation, reason=reason, error=storable(error))
    number = repeat(lambda: runtime.connections.transact("continuation-bury", bury, single=True))
    if number is None:
        return False
    entry_id = entry_id_of(runtime.label, number)
    runtime.results.fail_continuation(continuation, error)
    tell(runtime, TaskBuried(continuation.task_id, continuation.task, entry_id, reason))
    return True


def poison(runtime: Runtime, key: Key) -> bool:
    """Doom the row of a message that the transport has given up; False if this store has no such row.

    The sweeper reports the doom and buries the row, like any other. A row that a run holds is not touched.
    """
    found = runtime.connections.transact("durable-poison", lambda executor: burials.poison(executor, key), single=True)
    if found.doomed:
        reach("poison:doomed")
    return found.doomed or found.is_kept or burials.buried(runtime.connections, key) is not None


def entry_id_of(label: str | None, number: int) -> int | str:
    """Return the id of an entry of the dead set for people: its number, after its store's label if it has one."""
    return number if label is None else f"{label}:{number}"


def forget(runtime: Runtime, key: Key, content: Content | None = None) -> bool:
    """Remove a row that no run holds: its run has ended well after all, or has run this content without a lock."""
    kept = None if content is None else as_kept(runtime, key, content)
    return runtime.connections.transact("durable-end", lambda executor: tasks.forget(executor, key, kept), single=True)


def revive(runtime: Runtime, entry_ids: Sequence[int]) -> int:
    """Take entries out of the dead set and publish their messages again, in new generations; returns their number.

    Results in the same store are removed by that commit: who asks from then on waits for the next.
    """
    revive_tasks = partial(_revive_tasks, runtime, entry_ids=entry_ids, place=runtime.store.place)
    rows = runtime.connections.transact("durable-revive", revive_tasks)
    publish_and_mark(runtime, [Message.of_row(row) for row in rows if row.pool is None])
    capacity.ring(runtime, [row.pool for row in rows])
    if len(rows) == len(entry_ids):
        return len(rows)
    interval_s = runtime.settings.lost_after
    revive_others = partial(doorbells.revive_continuations, entry_ids=entry_ids, check_interval_s=interval_s)
    return len(rows) + runtime.connections.transact("continuation-revive", revive_others, single=True)


def _revive_tasks(
    runtime: LocalRuntime, executor: Transaction, *, entry_ids: Sequence[int], place: int
) -> Sequence[Any]:
    rows = burials.revive(executor, entry_ids=entry_ids, check_interval_s=runtime.settings.lost_after)
    if rows:
        runtime.results.forget(executor, [row.task_id for row in rows], place=place)
    return rows


def not_revived(entry_id: int | str, task_id: str | None) -> IllegalMoveError:
    """Return the error for an entry that exists and did not leave the dead set."""
    return IllegalMoveError(
        f"Entry {entry_id} of the dead set cannot be retried: a task {task_id} waits or runs already, or somebody "
        "has just retried it."
    )


# -- revocations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Revoked:
    """The tasks found to revoke, by task id, and the stores that may lack the revocation."""

    waiting: tuple[str, ...] = ()
    """Tasks that do not run; the sweeper reports their revocation to the result backend, and buries them."""
    running: tuple[str, ...] = ()
    """Tasks that run; they continue, and do not begin again."""
    unavailable: StoreUnavailableError | None = None
    """Why a store that may have one of the tasks did not answer; None if all answered."""
    unfit: SchemaError | None = None
    """Why a store cannot keep revocations; None if all can."""


def revoke_in_all(runtime: Runtime, task_ids: Iterable[str]) -> Revoked:
    """Store the revocation of these task ids in every store that answers.

    Two stores may each have a copy, so all are asked. A silent store is no problem if each id was found in another
    store: before a copy is buried there, the other copies are revoked (`deduplication.revoke`).
    """
    ids = [task_id for task_id in task_ids if is_keepable(task_id)]
    waiting: dict[str, None] = {}
    running: dict[str, None] = {}
    unavailable: StoreUnavailableError | None = None
    unfit: SchemaError | None = None
    for there in runtime.in_each_store():
        try:
            with runtime.stores.trying(there.store):
                found = revoke(there, ids)
        except StoreUnavailableError as error:
            unavailable = error
        except SchemaError as error:
            unfit = error
        else:
            waiting.update(dict.fromkeys(found.waiting))
            running.update(dict.fromkeys(found.running))
    if all(task_id in waiting or task_id in running for task_id in ids):
        unavailable = None
    return Revoked(tuple(task_id for task_id in waiting if task_id not in running), tuple(running), unavailable, unfit)


def revoke(runtime: Runtime, task_ids: Iterable[str]) -> Revoked:
    """Store the revocation of these task ids, in one statement.

    Ids without a row, of jobs and of tasks revoked before, are skipped. Raises StoreUnavailableError. Once committed,
    the revocation is valid even if this process dies.
    """
    ids = list(task_ids)

    def work(executor: Transaction) -> Revoked:
        rows = tasks.revoke(executor, ids)
        return Revoked(
            tuple(row.task_id for row in rows if not row.runs), tuple(row.task_id for row in rows if row.runs)
        )

    return repeat(lambda: runtime.connections.transact("durable-revoke", work, within_s=runtime.stores.wait_s))
