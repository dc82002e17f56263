"""Deduplication: which of two copies of a durable task's message counts, if two stores have one each.

Two copies exist if a publisher gave its message to a store, got no answer, and then gave it to the next store too. The
second store notes this; the first cannot know. A process that has locked a copy for a run, or is about to bury it, asks
the other stores:

- The first store's copy, which only a sweeper can have published, gives way if the second store has noted a copy. First
  it settles in the second store that the second copy runs.
- The second store's copy removes the first, unless a run holds the first or the first is being buried. If it is, or has
  run or was buried, the second copy gives way itself, unless it was settled that the second copy runs.

Settling and giving way meet in one row of the second store: the copies can never both give way. A store that does not
answer cannot be asked: then the copy here counts. `tests/protocol_model/copies.py` walks all interleavings, and shows
the faults of simpler rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..model.durable import DELAYED, Address, Key, Message, call_of
from ..model.errors import StoreUnavailableError
from ..store import duplicates
from ..store.duplicates import Copy
from ..store.outbox import holds, tasks
from ..store.outbox.arming import end_task_runs
from ..store.statement import Transaction
from .runtime import Runtime
from .stores import Store

T = TypeVar("T")


def of_rows(runtime: Runtime, rows: Sequence[Any]) -> list[Message]:
    """Make the messages of rows that are to be published again, with the known facts about their copies."""
    messages = [Message.of_row(row) for row in rows]
    if not runtime.stores.several or not messages:
        return messages
    addresses = addresses_of(runtime, rows)
    return [
        replace(message, call=address.call, tried=address.tried, unconfirmed=address.unconfirmed)
        for message, address in zip(messages, addresses, strict=True)
    ]


def addresses_of(runtime: Runtime, rows: Sequence[Any]) -> list[Address]:
    """Return the known facts about the copies of rows: (task_id, generation, publication).

    Whether the publisher or a sweeper published a row is no longer known.
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


def addressed(runtime: Runtime, messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages with the name of their rows' store in them, if there are several stores."""
    if not runtime.stores.several or not messages:
        return messages
    return [replace(message, store=runtime.name) for message in messages]


def unconfirmed(runtime: Runtime, message: Message) -> Address:
    """Return the address of a message that came without a row, although a store may have a copy."""
    return Address(call=message.call if runtime.stores.several else None, unconfirmed=True)


def gives_way(runtime: Runtime, key: Key, address: Address, *, worker_id: int | None = None) -> bool:
    """Remove this store's copy of a message if another store's copy counts; tell whether it was removed.

    The copy must be locked by `worker_id`, or about to be buried: asking settles which copy runs, so the caller must be
    able to act on the result. After a death in between the copy stays, and the next caller asks again.
    """
    if address.call is None:
        return False
    copy = (key[0], address.call)
    return _is_noted_elsewhere(runtime, key, address, copy, worker_id) or (
        bool(address.tried) and _was_begun_before(runtime, key, address, copy, worker_id)
    )


def revoke(runtime: Runtime, key: Key, address: Address) -> bool:
    """Revoke the copies in other stores too, because this copy may give way to them; False if a store is silent.

    The revoker may have reached only this store. After a death in between the revoked copy here is handled again.
    """
    if address.call is None:
        return True
    call = address.call
    for store in runtime.stores.others(runtime.store):
        try:
            with runtime.stores.asking(store):
                doom = partial(tasks.revoke, task_ids=[key[0]], call=call)
                store.connections.transact("durable-copy", doom, within_s=runtime.stores.wait_s)
        except StoreUnavailableError:
            return False
    return True


def may_be_silent(runtime: Runtime, address: Address) -> bool:
    """Tell whether a store that may have another copy did not answer lately."""
    return address.call is not None and address.unconfirmed and runtime.stores.any_left_alone


def is_to_be_noted(address: Address) -> bool:
    """Tell whether to note that a copy was begun or buried: its publisher may be about to make another copy.

    This is not needed for a copy that has waited here for its eta: by then its publisher is long done.
    """
    return address.call is not None and address.unconfirmed and not address.call.startswith(DELAYED)


def note_in(executor: Transaction, key: Key, address: Address) -> None:
    """Note, if need be, that a copy was begun or buried, in the transaction that does so."""
    if is_to_be_noted(address):
        _note(executor, key, address)


def note(runtime: Runtime, key: Key, address: Address) -> None:
    """Note that the copy here was begun, if a store that may have another copy did not answer."""
    if may_be_silent(runtime, address):
        _transact(runtime, lambda executor: _note(executor, key, address))


def _note(executor: Transaction, key: Key, address: Address) -> None:
    duplicates.note(executor, [(key[0], str(address.call))], kept_s=duplicates.RECENT_S)


# --------------------------------------------------------------------------------------------------------------------


def _is_noted_elsewhere(runtime: Runtime, key: Key, address: Address, copy: Copy, worker_id: int | None) -> bool:
    """Drop the copy here if another store has noted a copy: its publisher may not know of the copy here."""
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
    """Give way if a store that the publisher tried before has begun or buried its copy, unless settled otherwise."""
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
    """Ask stores until one answers yes; a silent store counts as no, and is not asked again for a while."""
    for store in stores:
        with suppress(StoreUnavailableError), runtime.stores.asking(store):
            if store.connections.transact("durable-copy", ask, single=True, within_s=runtime.stores.wait_s):
                return True
    return False


def _name(runtime: Runtime, store: Store) -> str | None:
    """Return the name of a store; None if it does not answer."""
    with suppress(StoreUnavailableError), runtime.stores.asking(store):
        return runtime.stores.name_of(store)
    return None


def _transact(runtime: Runtime, work: Callable[[Transaction], T]) -> T:
    return runtime.connections.transact("durable-copy", work, within_s=runtime.settings.lease)
