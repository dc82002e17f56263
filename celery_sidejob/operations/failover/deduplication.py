"""Which of two copies of a durable task's message counts, where two stores have one each.

Both are there when a publisher gave its message to a store, heard nothing, and gave it to the next one too. The second
notes that; the first cannot know. Who has locked a copy for a run, or would bury it, asks the other stores:

- the first's copy, which only a sweeper can have published, gives way if the second has noted one: it settles there
  that this other one runs, come what may;
- the second's copy removes the first, if nobody runs or buries that; if somebody does or has, it gives way itself,
  unless it was settled that it runs.

Settling and giving way meet in one row of the second store, so that never both copies give way. A store that does not
answer cannot be asked: then the copy here is taken for the one that counts. `tests/protocol_model/copies.py` walks all
interleavings, and shows what comes of simpler rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from ...model.durable import WAITS, Address, Key, Message, call_of
from ...model.errors import StoreUnavailableError
from ...store import duplicates
from ...store.duplicates import Copy
from ...store.outbox import holds, revocation
from ...store.statement import Transaction
from ..runtime import Runtime
from ..task_run_end import end_task_runs
from .stores import Store

T = TypeVar("T")

logger = logging.getLogger("celery_sidejob")


def of_rows(runtime: Runtime, rows: Sequence[Any]) -> list[Message]:
    """Make the messages of rows that are to be published again, with what is known of their copies."""
    messages = [Message.of_row(row) for row in rows]
    if not runtime.stores.several or not messages:
        return messages
    addresses = addresses_of(runtime, rows)
    return [
        replace(message, call=address.call, tried=address.tried, unconfirmed=address.unconfirmed)
        for message, address in zip(messages, addresses, strict=True)
    ]


def addresses_of(runtime: Runtime, rows: Sequence[Any]) -> list[Address]:
    """Tell of rows what is known of their copies: (task_id, generation, publication).

    Who has been published by its publisher, and who by a sweeper, nobody knows any more.
    """
    if not runtime.stores.several or not rows:
        return [Address() for _ in rows]
    tried = duplicates.tried(runtime.connections, [row.task_id for row in rows])
    found = []
    for row in rows:
        call = call_of(row.publication) if row.generation == 1 and row.publication else None
        stores = tried.get((row.task_id, call or ""), ())
        found.append(Address(call=call, tried=stores, unconfirmed=call is not None))
    return found


def gives_way(runtime: Runtime, key: Key, address: Address, *, worker_id: int | None = None) -> bool:
    """Remove the copy of a message that is here, if another store has the one that counts; tells whether it did.

    The copy must be locked by `worker_id`, or about to be buried: who only looks would settle what it cannot hold to.
    Dying in between leaves it, and whoever comes next asks anew.
    """
    if address.call is None:
        return False
    copy = (key[0], address.call)
    return _is_noted_elsewhere(runtime, key, address, copy, worker_id) or (
        bool(address.tried) and _was_begun_before(runtime, key, address, copy, worker_id)
    )


def revoke(runtime: Runtime, key: Key, address: Address) -> bool:
    """Have copies in other stores revoked like the one here, which may give way to them; False if one is silent.

    Who revoked it may have reached this store alone. Dying in between leaves a revoked copy here, to be seen to anew.
    """
    if address.call is None:
        return True
    call = address.call
    for store in runtime.stores.others(runtime.store):
        if store.is_left_alone:
            return False
        try:
            with runtime.stores.trying(store):
                store.connections.transact(
                    "durable-copy", lambda executor: _doom_copy(executor, key, call), within_s=runtime.stores.wait_s
                )
        except StoreUnavailableError:
            return False
    return True


def is_to_be_noted(address: Address) -> bool:
    """Tell whether it is noted that a copy was begun or buried: its publisher may be about to give another away.

    Not one that has waited here for its eta: by then its publisher has long done what it does.
    """
    return address.call is not None and address.unconfirmed and not address.call.startswith(WAITS)


def note(runtime: Runtime, key: Key, address: Address) -> None:
    """Note that the copy here was begun, where a store that may have another did not answer."""
    if address.call is not None and address.unconfirmed and runtime.stores.any_left_alone:
        copy = (key[0], address.call)
        _transact(runtime, lambda executor: duplicates.note(executor, [copy], kept_s=duplicates.RECENT_S))


# --------------------------------------------------------------------------------------------------------------------


def _is_noted_elsewhere(runtime: Runtime, key: Key, address: Address, copy: Copy, worker_id: int | None) -> bool:
    """No publisher knows of the copy here: has one given it to another store as well?"""
    if not address.unconfirmed:
        return False
    asked = (store for store in runtime.stores.others(runtime.store) if _name(runtime, store) not in address.tried)
    if not _any(runtime, asked, lambda executor: duplicates.settle(executor, copy)):
        return False

    def drop(executor: Transaction) -> None:
        duplicates.forget(executor, copy)
        end_task_runs(executor, holds.drop(key, worker_id=worker_id))

    _transact(runtime, drop)
    return True


def _was_begun_before(runtime: Runtime, key: Key, address: Address, copy: Copy, worker_id: int | None) -> bool:
    """The publisher had given it to other stores before: do they have it, and has it begun there?"""
    asked = (store for store in runtime.stores.others(runtime.store) if _name(runtime, store) in address.tried)
    if not _any(runtime, asked, lambda executor: duplicates.take(executor, copy)):
        return False

    def give_way(executor: Transaction) -> bool:
        given = duplicates.give_way(executor, copy)
        if given:
            end_task_runs(executor, holds.drop(key, worker_id=worker_id))
        return given

    return _transact(runtime, give_way)


def _any(runtime: Runtime, stores: Iterable[Store], ask: Callable[[Transaction], bool]) -> bool:
    """Ask stores until one says yes; one that does not answer says nothing, and is left alone for a while."""
    for store in stores:
        if store.is_left_alone:
            continue
        with suppress(StoreUnavailableError), runtime.stores.trying(store):
            if store.connections.transact("durable-copy", ask, single=True, within_s=runtime.stores.wait_s):
                return True
    return False


def _doom_copy(executor: Transaction, key: Key, call: str) -> None:
    revocation.revoke(executor, [key[0]], call=call)


def _name(runtime: Runtime, store: Store) -> str | None:
    """Return the name of a store; None if it does not answer."""
    if store.is_left_alone:
        return None
    with suppress(StoreUnavailableError), runtime.stores.trying(store):
        return runtime.stores.name_of(store)
    return None


def _transact(runtime: Runtime, work: Callable[[Transaction], T]) -> T:
    return runtime.connections.transact("durable-copy", work, within_s=runtime.settings.lease)
