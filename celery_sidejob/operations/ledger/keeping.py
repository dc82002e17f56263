"""Keep messages of ordinary durable tasks: in the first store that answers, or in a transaction lent by the caller.

The broker is then given the messages (`after_commit.py`). If the process dies in between, the sweeper does that.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from ...model.durable import DELAYED, Message
from ...model.errors import DuplicateError, IllegalMoveError, InvalidValueError, StoreUnavailableError
from ...model.settings import Settings
from ...store import duplicates
from ...store.borrowed.borrowed import SERIALIZATION_FAILURE, Borrowed, code_of
from ...store.connection.connections import repeat
from ...store.connection.own_executor import OwnExecutor
from ...store.errors import OutcomeUnknown, StoreDown
from ...store.outbox import tasks
from ...store.outbox.tasks import Kept
from ...store.statement import Reader, Transaction
from ..after_commit import publish_kept, sends
from ..changes import batches
from ..changes.follow_up import do_after_commit
from ..changes.unique_keys import KeyHeldError
from ..gates import capacity
from ..runtime import LocalRuntime, Runtime, patiently

T = TypeVar("T")

PAGE = 1000
PAGE_BYTES = 8_000_000
"""The most messages that one statement keeps, and their largest total size without the last one."""
PAGE_TAKES_S = 1.0
"""Seconds by which each further page of a call is checked later by the sweeper: a page may take its publisher so long.
"""


def keep(runtime: Runtime, message: Message) -> None:
    """Keep a message and give it to the broker. Once this returns, the task runs or is in the dead set.

    It is kept in the first store that answers. The wait for each silent store is bounded, and happens once per pause.
    Raises StoreUnavailableError if no store answers, or an open transaction has locked the task id, the unique key or
    the pool for too long; InvalidValueError if another message with this task id is not finished, and KeyHeldError if
    another message has its unique key. A message due later than `sidejob_timer_horizon` waits in the store. If the
    process dies between commit and publication, the sweeper publishes.
    """
    if batches.present() is not None:
        _check_takes_tasks(runtime)
    there, tried, kept = _in_the_first(runtime, partial(_keep, message))
    if not kept.waits:
        publish_kept(there, [replace(message, tried=tried) if tried else message])
    if message.admission is not None:
        capacity.ring(there, _pools([message]))


class _NotKeptError(Exception):
    """A message is not kept: the transaction that took its slots is rolled back."""


def keep_again(runtime: Runtime, message: Message) -> None:
    """Keep a message that a run publishes after its body, in the run's own store, unless a first try has kept it.

    Tries for a lease if the store is unavailable: Celery treats an errback that cannot be sent as sent, and before 5.7
    the body of a chord as failed.
    """
    keep = partial(tasks.keep, message=message, settings=runtime.settings)
    once = partial(runtime.connections.transact, "durable-keep", keep, single=True, within_s=runtime.patience_s)
    kept = patiently(runtime, partial(repeat, once))
    if kept is not None and not kept.waits:
        publish_kept(runtime, [message])
    if message.admission is not None:
        capacity.ring(runtime, [message.admission.pool.name])


def lend(runtime: Runtime, message: Message, transaction: Any) -> None:
    """Keep a message in the caller's transaction, and give it to the broker once the transaction is committed.

    If we do not learn of the commit, or this process dies before, the sweeper gives it to the broker.
    """
    _check_takes_tasks(runtime)
    borrowed: Borrowed = runtime.connections.borrow(transaction)
    capacity.prepare(runtime, [message.admission], lent=True)
    with capacity.refusing(runtime), borrowed.atomic():
        admitted = _admitted_alone(borrowed, message)
        while admitted is None or not _is_lent(borrowed, admitted, runtime.settings):
            if (refusal := _refusal(borrowed, message)) is not None:
                raise refusal
            admitted = admitted or _admitted_alone(borrowed, message)
        batches.join_tasks(borrowed, [message.task_id])

    _publish_after_commit(runtime, borrowed, [[admitted]])


def _publish_after_commit(runtime: Runtime, borrowed: Borrowed, pages: Sequence[Sequence[Message]]) -> None:
    """Publish lent messages after the caller's commit, and works that got slots by that commit.

    The savepoint of a message may have been rolled back, and the sweeper may have been faster. If the commit has sent a
    message itself, a worker may be woken without need.
    """

    def committed() -> None:
        for page in pages:
            admitted = [message for message in page if message.admission is None or message.slot is not None]
            unsent = [message.task_id for message in admitted if not sends(runtime, message)]
            there = unsent and tasks.unpublished(runtime.connections, unsent, horizon_s=runtime.settings.timer_horizon)
            due = [message for message in admitted if message.task_id in there or sends(runtime, message)]
            publish_kept(runtime, due)
        lent = [message for page in pages for message in page]
        capacity.ring(runtime, [one.admission.pool.name for one in lent if one.admission and one.slot is None])

    borrowed.after_commit(partial(do_after_commit, committed))


def _is_lent(borrowed: Borrowed, message: Message, settings: Settings) -> bool:
    """Keep a message in the caller's transaction; False if another message is in the way."""
    try:
        return tasks.keep(borrowed, message, settings) is not None
    except Exception as error:
        if message.unique_key is None or code_of(error) != SERIALIZATION_FAILURE:
            raise
        raise DuplicateError(
            f"A task that your transaction does not see yet has the unique key {message.unique_key!r}: repeat the "
            "transaction."
        ) from error


def keep_many(runtime: Runtime, messages: Sequence[Message], *, of_run: bool = False) -> None:
    """Keep messages, all or none in one commit, and give them to the broker, each page at once.

    All go to the first store that answers, as in `keep`. With `of_run` they go to this store: a run publishes them
    after its body, and its first try may have kept them already. Raises StoreUnavailableError, and InvalidValueError if
    a task id is taken.
    """
    _check_ids(messages)
    _check_takes_tasks(runtime)
    pages = list(_pages(messages))

    def keep(there: Runtime, tried: tuple[str, ...]) -> set[str] | None:
        return _keep_all(there, pages, tried, repeated=of_run)

    there, tried, waiting = (runtime, (), keep(runtime, ())) if of_run else _in_the_first(runtime, keep)
    if waiting is None:
        return  # all are kept, and the sweeper publishes them
    for page in pages:
        due = [message for message in page if message.task_id not in waiting]
        if tried:
            due = [replace(message, tried=tried) for message in due]
        sent = publish_kept(there, due)
        if due and not sent and not runtime.broker.ready:
            return  # the sweeper publishes the rest
    capacity.ring(there, _pools(messages))


def lend_many(runtime: Runtime, messages: Sequence[Message], transaction: Any) -> None:
    """Keep messages in the caller's transaction, and give them to the broker once it is committed."""
    _check_ids(messages)
    _check_takes_tasks(runtime)
    pages = list(_pages(messages))
    borrowed: Borrowed = runtime.connections.borrow(transaction)
    capacity.prepare(runtime, [message.admission for message in messages], lent=True)
    with capacity.refusing(runtime), borrowed.atomic():
        pages = _admitted(borrowed, pages)
        _keep_pages(borrowed, pages, runtime.settings, repeated=False)
        batches.join_tasks(borrowed, [message.task_id for message in messages])

    _publish_after_commit(runtime, borrowed, pages)


def keep_in(runtime: LocalRuntime, executor: Transaction, messages: Sequence[Message]) -> Sequence[Message]:
    """Keep messages in a transaction of ours, and return the messages that the caller must publish after its commit."""
    pages = _admitted(executor, list(_pages(messages)))
    waiting = _keep_pages(executor, pages, runtime.settings, repeated=False)
    return [message for message in messages if message.task_id not in waiting]


def is_kept_somewhere(runtime: Runtime, task_id: str) -> bool:
    """Tell whether some store has the row of a task id; this store is asked first.

    Raises StoreUnavailableError if a store does not answer, and no other has the row.
    """
    stores = runtime.stores
    failure: StoreUnavailableError | None = None
    for store in (runtime.store, *stores.others(runtime.store)):
        try:
            with stores.asking(store):
                row = store.connections.read(lambda executor: tasks.read(executor, task_id), within_s=stores.wait_s)
        except StoreUnavailableError as error:
            failure = error
        else:
            if row is not None:
                return True
    if failure is not None:
        raise failure
    return False


def may_lack_row(runtime: Runtime, error: StoreUnavailableError) -> bool:
    """Tell whether a task that a store could not keep is published without a row, as `sidejob_on_store_down` allows.

    A store in which a row is locked has answered, and a batch has rows for its members.
    """
    is_down = isinstance(error, StoreDown) and batches.present() is None
    return is_down and runtime.settings.on_store_down == "publish"


def name_call(runtime: Runtime, eta: Callable[[], datetime | None]) -> str | None:
    """Name a call that waits until its `eta`, if two stores may come to have a copy of its message."""
    if not runtime.stores.several:
        return None
    at = eta()
    waits = at is not None and at - datetime.now(UTC) > timedelta(seconds=runtime.settings.timer_horizon)
    return (DELAYED if waits else "") + secrets.token_hex(8)


# --------------------------------------------------------------------------------------------------------------------


def _check_takes_tasks(runtime: Runtime) -> None:
    """Refuse a call in the block of a batch if another store than the batch's may keep the task."""
    if batches.present() is not None and runtime.stores.several:
        raise IllegalMoveError(
            "A batch takes no durable tasks where there are several stores (sidejob_failover_urls): another store may "
            "keep them. Make jobs of them, or call them outside of the block."
        )


def _in_the_first(runtime: Runtime, do: Callable[[Runtime, tuple[str, ...]], T]) -> tuple[Runtime, tuple[str, ...], T]:
    """Run `do` in the first of the stores that answers; return that store's runtime, the stores tried, and the result.

    Each call begins with the primary. The stores tried took the call and did not answer, so they may have executed it;
    `do` and the caller get their names.
    """
    tried: list[str] = []
    failure: StoreDown | None = None
    stores = runtime.stores
    for store in stores:
        if store.is_left_alone:
            continue
        there = runtime if store is runtime.store else runtime.at(store)
        began = monotonic()
        try:
            name = stores.name_of(store) if stores.several else ""
            return there, tuple(tried), do(there, tuple(tried))
        except StoreDown as error:
            stores.failed(store, error, after_s=monotonic() - began)
            tried += [name] if isinstance(error, OutcomeUnknown) else []
            failure = error
    raise failure or stores.all_left_alone()


def _keep(message: Message, runtime: Runtime, tried: tuple[str, ...]) -> Kept:
    """Keep a message in one store."""
    within_s = runtime.stores.wait_s
    is_unknown = False  # whether a try got no answer

    def once() -> Kept | None:
        nonlocal is_unknown
        try:
            return _try_to_keep(runtime, message, tried)
        except _NotKeptError:
            return None
        except OutcomeUnknown:
            is_unknown = True
            raise

    with nullcontext() if message.admission is None else capacity.refusing(runtime):
        while (kept := repeat(once)) is None:
            if is_unknown and _is_kept(runtime, message, within_s):
                return Kept(waits=True)  # the first of two tries kept it: the sweeper publishes it
            refusal = runtime.connections.read(lambda executor: _refusal(executor, message), within_s=within_s)
            if refusal is not None:
                raise refusal
        return kept


def _try_to_keep(runtime: Runtime, message: Message, tried: tuple[str, ...]) -> Kept | None:
    """Run the transaction that keeps a message; None if another message is in the way.

    Raises _NotKeptError if it has taken slots for nothing.
    """
    within_s = runtime.stores.wait_s
    is_judged = message.admission is not None and message.admission.is_judged
    single = not tried and message.replaces is None and not is_judged and batches.present() is None

    def keeping(executor: OwnExecutor) -> Kept | None:
        gave_way = False
        if message.replaces is not None and message.unique_key is not None:
            gave_way = tasks.give_way(executor, message.replaces, key=message.unique_key)
        admitted = _admitted_alone(executor, message) if is_judged else message
        kept = tasks.keep(executor, admitted, runtime.settings) if admitted is not None else None
        if gave_way and kept is None:
            raise _taken(message.task_id)  # the key is free now, and the row that has given way comes back
        if is_judged and kept is None:
            raise _NotKeptError
        if kept is not None and not single:
            _note(executor, [message], tried)
            batches.join_tasks(executor, [message.task_id])
        return kept

    return runtime.connections.transact("durable-keep", keeping, single=single, within_s=within_s)


def _refusal(executor: Reader, message: Message) -> Exception | None:
    """Return the reason why a message was not kept; None if the task that had its unique key has ended since."""
    if message.unique_key is None:
        return _taken(message.task_id)
    other = tasks.in_the_way(executor, message.task_id, key=message.unique_key)
    if other is None:
        return None
    return KeyHeldError(other.task_id, waits=other.waits) if other.has_key else _taken(message.task_id)


def _is_kept(runtime: Runtime, message: Message, within_s: float) -> bool:
    """Tell whether the conflicting row is the message's own; OutcomeUnknown if the store stops answering just then."""
    try:
        return runtime.connections.read(lambda executor: tasks.is_kept(executor, message), within_s=within_s)
    except StoreUnavailableError as error:
        raise OutcomeUnknown(f"There is a row of this task id, which may be of this very call: {error}") from error


def _keep_all(
    runtime: Runtime, pages: Sequence[list[Message]], tried: tuple[str, ...], *, repeated: bool
) -> set[str] | None:
    """Keep all pages; returns the ids of messages that wait in the store, None if a first try had kept them."""
    within_s = runtime.stores.wait_s + len(pages) * PAGE_TAKES_S

    def work(executor: OwnExecutor) -> set[str]:
        kept = pages if repeated else _admitted(executor, pages)
        waiting = _keep_pages(executor, kept, runtime.settings, repeated=repeated)
        _note(executor, [message for page in pages for message in page], tried)
        batches.join_tasks(executor, [message.task_id for page in pages for message in page])
        return waiting

    first = True

    def once() -> set[str] | None:
        nonlocal first
        again, first = not first, False
        if again and runtime.connections.read(lambda executor: tasks.is_kept(executor, pages[0][0]), within_s=within_s):
            return None
        return runtime.connections.transact("durable-keep", work, within_s=within_s)

    with capacity.refusing(runtime):
        return repeat(once)


def _note(executor: Transaction, messages: Sequence[Message], tried: tuple[str, ...]) -> None:
    """Note the calls of messages that the `tried` stores may have too."""
    made = [(message.task_id, message.call) for message in messages if message.call is not None]
    if made and tried:
        duplicates.note(executor, made, tried=tried, kept_s=duplicates.KEPT_S)


def _check_ids(messages: Sequence[Message]) -> None:
    seen: set[str] = set()
    for message in messages:
        if message.task_id in seen:
            raise InvalidValueError(f"task_id={message.task_id!r} is given to two tasks of one call: leave it out.")
        seen.add(message.task_id)


def _pages(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield messages in order, one statement's worth at a time: a thousand, or a few megabytes."""
    page: list[Message] = []
    size = 0
    for message in messages:
        page.append(message)
        size += len(message.body) + len(message.publication)
        if len(page) == PAGE or size >= PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


def _keep_pages(
    executor: Transaction, pages: Iterable[list[Message]], settings: Settings, *, repeated: bool
) -> set[str]:
    """Keep all messages, or raise; returns the ids of those that wait in the store."""
    waiting: set[str] = set()
    for number, page in enumerate(pages):
        held_back, taken = tasks.keep_many(executor, page, settings, publishing_takes_s=number * PAGE_TAKES_S)
        if taken is not None and not repeated:
            raise _taken(taken)
        waiting.update(held_back)
    return waiting


def _pools(messages: Iterable[Message]) -> set[str]:
    """Return the pools of messages that are not judged: they may have got their slots by now."""
    return {
        message.admission.pool.name
        for message in messages
        if message.admission is not None and not message.admission.is_judged
    }


def _admitted_alone(executor: Transaction, message: Message) -> Message | None:
    """Take the slots of a message and return it with them; None if another task has its unique key."""
    if not capacity.judged(message):
        return message
    if message.unique_key is not None and tasks.in_the_way(executor, message.task_id, key=message.unique_key):
        return None
    return capacity.admit(executor, [message])[0]


def _admitted(executor: Transaction, pages: Sequence[list[Message]]) -> list[list[Message]]:
    """Take the slots of all messages, all or none, and return them with their slots."""
    messages = [message for page in pages for message in page]
    if not any(map(capacity.judged, messages)):
        return list(pages)
    admitted = iter(capacity.admit(executor, messages))
    return [[next(admitted) for _ in page] for page in pages]


def _taken(task_id: str) -> InvalidValueError:
    return InvalidValueError(
        f"task_id={task_id!r} is taken: a durable task of this id waits or runs. Give each call an id of "
        "its own, or none."
    )
