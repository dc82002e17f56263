"""Revoking ordinary durable tasks, so that it outlives every worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..model.checks import is_keepable
from ..model.errors import SchemaError, StoreUnavailableError
from ..store.errors import NoAnswer, OutcomeUnknown
from ..store.outbox import revocation
from ..store.statement import Transaction
from .runtime import Runtime


@dataclass(frozen=True, slots=True)
class Revoked:
    """What was there to be revoked, by task id."""

    waiting: tuple[str, ...] = ()
    """These do not run; the sweeper tells who waits for them, and buries them."""
    running: tuple[str, ...] = ()
    """These go on, and do not begin again."""


@dataclass(frozen=True, slots=True)
class RevokedInAll(Revoked):
    """What was there to be revoked in all stores, and what is not known to be kept."""

    unavailable: StoreUnavailableError | None = None
    """Why a store that may have one of the tasks did not answer."""
    unfit: SchemaError | None = None
    """Why a store can keep no revocation."""


def revoke_in_all(runtime: Runtime, task_ids: Iterable[str]) -> RevokedInAll:
    """Keep the revocation of these task ids in every store that answers.

    Two stores may have a copy each, so all are asked. One that does not answer is no trouble where each id was found in
    another: who buries it there has a copy revoked first (`copies.revoke`).
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
    return RevokedInAll(tuple(task_id for task_id in waiting if task_id not in running), tuple(running),
                        unavailable, unfit)  # fmt: skip


def revoke(runtime: Runtime, task_ids: Iterable[str]) -> Revoked:
    """Keep the revocation of these task ids, in one statement.

    Ids without a row, of jobs and of what was revoked before, are passed over. Raises StoreUnavailableError. Who dies
    after the commit has revoked them, whoever was told of it.
    """
    ids = list(task_ids)

    def work(executor: Transaction) -> Revoked:
        rows = revocation.revoke(executor, ids)
        return Revoked(
            tuple(row.task_id for row in rows if not row.runs), tuple(row.task_id for row in rows if row.runs)
        )

    try:
        return runtime.connections.transact("durable-revoke", work, within_s=runtime.stores.wait_s)
    except NoAnswer:
        raise  # nor would it answer at once
    except OutcomeUnknown:
        return runtime.connections.transact("durable-revoke", work, within_s=runtime.stores.wait_s)
