"""Revoking durable tasks: the store keeps the revocation, whatever happens to workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...model.checks import is_keepable
from ...model.errors import SchemaError, StoreUnavailableError
from ...store.connection.connections import repeat
from ...store.outbox import tasks
from ...store.statement import Transaction
from ..runtime import Runtime


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
