"""Keep messages of ordinary durable tasks: in the first of the stores that answers, or in a transaction that was lent.

Then the broker is given them (`publishing.py`); whoever dies in between leaves that to the sweeper.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..model.durable import Message
from ..model.errors import InvalidValueError, StoreUnavailableError
from ..store import duplicates
from ..store.borrowed.borrowed import Borrowed
from ..store.connection.own_executor import OwnExecutor
from ..store.errors import OutcomeUnknown
from ..store.outbox import tasks
from ..store.outbox.tasks import Kept, Waits
from ..store.statement import Transaction
from .failover.first import in_the_first
from .publishing import addressed, send
from .retrying import patience_s, patiently, repeat
from .runtime import Runtime

T = TypeVar("T")

logger = logging.getLogger("celery_sidejob")

PAGE = 1000
PAGE_BYTES = 8_000_000
"""How many messages one statement keeps at most, and how large they may be together, but for the last."""
PAGE_TAKES_S = 1.0
"""How much later the sweeper checks each further page of one call: so long its publisher may take for a page."""


def keep(runtime: Runtime, message: Message) -> None:
    """Keep a message and give it to the broker. Once this returns it runs or is in the dead set.

    It is kept in the first of the stores that answers, and the wait for each that does not is bounded: once per pause.
    Raises StoreUnavailableError if none does, or InvalidValueError if another message of this task id is not finished.
    What is not due before `sidejob_timer_horizon` waits in the store. Dying between commit and publication only means
    that the sweeper publishes.
    """
    began = time.monotonic()
    ready: list[Any] = []
    there, tried, kept = in_the_first(runtime, lambda there, tried: _keep(there, message, tried, ready))
    if not kept.waits:
        send(there, [replace(message, tried=tried) if tried else message], since=began, ready=ready[0])


def keep_again(runtime: Runtime, message: Message) -> None:
    """Keep what a run publishes after its body, in the run's own store, unless its first try has kept it already.

    A store that is away is tried for a lease: Celery takes an errback that cannot be sent for sent, and before 5.7 the
    body of a chord for failed.
    """

    def once() -> Kept | None:
        return runtime.connections.transact(
            "durable-keep", lambda executor: tasks.keep(executor.run, message, waits_of(runtime)), single=True,
            within_s=patience_s(runtime),
        )  # fmt: skip

    began = time.monotonic()
    kept = patiently(runtime, lambda: repeat(once))
    if kept is not None and not kept.waits:
        send(runtime, [message], since=began)


def lend(runtime: Runtime, message: Message, transaction: Any) -> None:
    """Keep a message in the caller's transaction, and give it to the broker once that is committed.

    Where nobody tells of the commit, and if this process dies before, the sweeper does.
    """
    borrowed: Borrowed = runtime.connections.borrow(transaction)
    began = time.monotonic()
    with borrowed.atomic():
        if tasks.keep(borrowed.run, message, waits_of(runtime)) is None:
            raise _taken(message.task_id)

    def committed() -> None:
        row = tasks.read(runtime.connections, message.task_id)  # its savepoint may have been rolled back
        if row is not None and row.unpublished:
            send(runtime, [message], since=began)

    borrowed.after_commit(partial(_after_commit, committed))


def keep_many(runtime: Runtime, messages: Sequence[Message], *, of_run: bool = False) -> None:
    """Keep messages, all or none in one commit, and give them to the broker, all of a page at once.

    All in the first store that answers, as `keep` does; or in this one, `of_run`: what a run publishes after its body,
    which its first try may have kept already. Raises StoreUnavailableError, and InvalidValueError where the task id of
    one is taken.
    """
    _check_ids(messages)
    pages = list(_pages(messages))
    ready: list[Any] = []

    def keep(there: Runtime, tried: tuple[str, ...]) -> set[str] | None:
        return _keep_all(there, pages, tried, ready, repeated=of_run)

    began = time.monotonic()
    there, tried, waiting = (runtime, (), keep(runtime, ())) if of_run else in_the_first(runtime, keep)
    if waiting is None:
        return  # all are kept, and the sweeper publishes them
    for number, (page, made) in enumerate(zip(pages, ready, strict=True)):
        due = [message for message in page if message.task_id not in waiting]
        if tried:
            due = [replace(message, tried=tried) for message in due]
        since = began + number * PAGE_TAKES_S
        sent = send(there, due, since=since, ready=made if len(due) == len(page) else None)
        if due and not sent and not runtime.broker.ready:
            return  # the sweeper publishes the rest


def lend_many(runtime: Runtime, messages: Sequence[Message], transaction: Any) -> None:
    """Keep messages in the caller's transaction, and give them to the broker once that is committed."""
    _check_ids(messages)
    pages = list(_pages(messages))
    borrowed: Borrowed = runtime.connections.borrow(transaction)
    began = time.monotonic()
    with borrowed.atomic():
        _keep_pages([borrowed.run] * len(pages), pages, waits_of(runtime), repeated=False)

    def committed() -> None:
        for number, page in enumerate(pages):
            ids = [message.task_id for message in page]
            # Its savepoint may have been rolled back, and the sweeper may have been quicker.
            there = tasks.unpublished(runtime.connections, ids, horizon_s=runtime.settings.timer_horizon)
            due = [message for message in page if message.task_id in there]
            send(runtime, due, since=began + number * PAGE_TAKES_S)

    borrowed.after_commit(partial(_after_commit, committed))


def is_kept_somewhere(runtime: Runtime, task_id: str) -> bool:
    """Tell whether some store has the row of a task id; this one is asked first.

    Raises StoreUnavailableError if a store does not answer, and none of the others has it.
    """
    stores = runtime.stores
    failure: StoreUnavailableError | None = None
    for store in (runtime.store, *stores.others(runtime.store)):
        if store.is_left_alone:
            failure = StoreUnavailableError(f"{store.where} has not answered a moment ago, and is not asked just now")
            continue
        try:
            with stores.trying(store):
                row = store.connections.read(lambda executor: tasks.read(executor, task_id), within_s=stores.wait_s)
        except StoreUnavailableError as error:
            failure = error
            continue
        if row is not None:
            return True
    if failure is not None:
        raise failure
    return False


def waits_of(runtime: Runtime) -> Waits:
    return Waits(runtime.settings.lost_after, runtime.settings.timer_horizon)


# --------------------------------------------------------------------------------------------------------------------


def _keep(runtime: Runtime, message: Message, tried: tuple[str, ...], ready: list[Any]) -> Kept:
    """Keep a message in one store; `ready` then has what the publisher has made of it meanwhile."""
    within_s = runtime.stores.wait_s
    is_unknown = False  # whether a try has had no answer

    def keeping(executor: OwnExecutor) -> Kept | None:
        ready.clear()
        kept = tasks.keep(_making_ready(runtime, executor, [message], tried, ready), message, waits_of(runtime))
        _note(executor, [message] if kept is not None else [], tried)
        return kept

    def once() -> Kept | None:
        nonlocal is_unknown
        try:
            return runtime.connections.transact("durable-keep", keeping, single=not tried, within_s=within_s)
        except OutcomeUnknown:
            is_unknown = True
            raise

    kept = repeat(once)
    if kept is None and is_unknown and _is_kept(runtime, message, within_s):
        return Kept(waits=True)  # by the first of two tries: the sweeper publishes it
    if kept is None:
        raise _taken(message.task_id)
    return kept


def _is_kept(runtime: Runtime, message: Message, within_s: float) -> bool:
    """Tell whether the row in whose way a message is, is its own; OutcomeUnknown if the store goes away just then."""
    try:
        return runtime.connections.read(lambda executor: tasks.is_kept(executor, message), within_s=within_s)
    except StoreUnavailableError as error:
        raise OutcomeUnknown(f"There is a row of this task id, which may be of this very call: {error}") from error


def _keep_all(
    runtime: Runtime, pages: Sequence[list[Message]], tried: tuple[str, ...], ready: list[Any], *, repeated: bool
) -> set[str] | None:
    """Keep all pages; returns the ids of those that wait in the store, None if a first try had kept them.

    What is to be sent is made meanwhile, and is in `ready` then: for each page what the publisher has made of it.
    """
    within_s = runtime.stores.wait_s + len(pages) * PAGE_TAKES_S

    def work(executor: OwnExecutor) -> set[str]:
        ready.clear()
        runs = [_making_ready(runtime, executor, page, tried, ready) for page in pages]
        waiting = _keep_pages(runs, pages, waits_of(runtime), repeated=repeated)
        _note(executor, [message for page in pages for message in page], tried)
        return waiting

    first = True

    def once() -> set[str] | None:
        nonlocal first
        again, first = not first, False
        if again and runtime.connections.read(lambda executor: tasks.is_kept(executor, pages[0][0]), within_s=within_s):
            return None
        return runtime.connections.transact("durable-keep", work, within_s=within_s)

    return repeat(once)


def _making_ready(
    runtime: Runtime, executor: OwnExecutor, messages: list[Message], tried: tuple[str, ...], ready: list[Any]
) -> Callable[..., list[Any]]:
    """Return what runs a statement and adds to `ready` meanwhile what the publisher has made of messages."""

    def make_ready() -> None:
        # A message says which stores were tried and which one has its row. This statement does not wait for a name.
        is_known = not tried and (runtime.store.name is not None or not runtime.stores.several)
        ready.append(runtime.publisher.make_ready(addressed(runtime, messages)) if is_known else None)

    return partial(executor.run_beside, make_ready)


def _note(executor: Transaction, messages: Sequence[Message], tried: tuple[str, ...]) -> None:
    """Note the calls of messages that the stores which were `tried` may have as well."""
    made = [(message.task_id, message.call) for message in messages if message.call is not None]
    if made and tried:
        duplicates.note(executor, made, tried=tried, kept_s=duplicates.KEPT_S)


def _after_commit(work: Callable[[], None]) -> None:
    try:
        work()
    except StoreUnavailableError as error:
        logger.warning("The transaction is committed; the sweeper will publish its tasks: %s", error)
    except Exception:  # the caller's commit is done, and must not seem to have failed
        logger.exception("The transaction is committed; the sweeper will publish its tasks")


def _check_ids(messages: Sequence[Message]) -> None:
    seen: set[str] = set()
    for message in messages:
        if message.task_id in seen:
            raise InvalidValueError(f"task_id={message.task_id!r} is given to two tasks of one call: leave it out.")
        seen.add(message.task_id)


def _pages(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield messages in order, a statement's worth at a time: a thousand, or a few megabytes."""
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
    runs: Iterable[Callable[..., Sequence[Any]]], pages: Iterable[list[Message]], waits: Waits, *, repeated: bool
) -> set[str]:
    """Keep all, each page by its own of `runs`, or raise; returns the ids of those that wait in the store."""
    waiting: set[str] = set()
    for number, (run, page) in enumerate(zip(runs, pages, strict=True)):
        held_back, taken = tasks.keep_many(run, page, waits, publishing_takes_s=number * PAGE_TAKES_S)
        if taken is not None and not repeated:
            raise _taken(taken)
        waiting.update(held_back)
    return waiting


def _taken(task_id: str) -> InvalidValueError:
    return InvalidValueError(
        f"task_id={task_id!r} is taken: a durable task of this id waits or runs. Give each call an id of "
        "its own, or none."
    )
