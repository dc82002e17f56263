"""What can be asked of the row of an ordinary durable task: keep, begin, go on, end, bury. One transaction each.

The order of a run is lock, body, result, then removal together with the rows of what follows it. `docs/durable.md`
has what a death in each gap gives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from ..model.crash_points import reach
from ..model.durable import Address, Key, Message
from ..model.errors import IllegalMoveError, InvalidValueError, LeaseLostError, StoreUnavailableError
from ..model.protocols import Observer
from ..store import durable, twins
from ..store.borrowed import Borrowed
from ..store.connection import NoAnswer, OutcomeUnknown, OwnExecutor
from ..store.durable import FIRST_LOOK_S, Kept, Waits
from ..store.put_off import PutOff
from ..store.sent import Sent
from ..store.statement import Executor
from . import copies, late_locks
from .endings import storable
from .hold import PAUSE_S
from .late_locks import LateLock
from .runtime import Aftermath, Runtime
from .stores import Stores

T = TypeVar("T")

logger = logging.getLogger("celery_sidejob")

NOWHERE = Address()
"""Of a message that can have no copy, as far as is known."""
PAGE = 1000
PAGE_BYTES = 8_000_000
"""How many messages one statement keeps at most, and how large they may be together, but for the last."""
MARK_S = FIRST_LOOK_S / 2
"""How long the mark of a published message may be put off."""
LATE_END_PATIENCE_S = 3600.0
"""How long a process goes on with ends that were given up."""
LATE_END_S = 0.5
"""How long after it was given up an end is tried again."""
PAGE_TAKES_S = 1.0
"""How much later the sweeper looks at each further page of one call: so long its publisher may take for a page."""
ALONE_S = FIRST_LOOK_S / 2
"""For how long after it began to keep a message its publisher is sure that nobody else has published it."""


class Claim(Protocol):
    """The right to publish the body of a chord, which the result backend gives to one at a time, for a while."""

    messages: Sequence[Message]
    """The body, among what follows the run that has it."""

    def hold(self) -> bool:
        """Have it for a while more; False if somebody else has had it, and the body is known.

        Raises ClaimedElsewhereError while that is open.
        """
        ...

    def settle(self) -> None:
        """Have the backend forget the chord, whose body is kept; never raises. Who dies before leaves it to expire."""
        ...


class ClaimedElsewhereError(StoreUnavailableError):
    """Somebody else is about to publish the body of a chord, or has died with that: this has to be tried again."""


@dataclass(eq=False, slots=True)
class Run:
    """A run of a durable task in this process, from its lock to its end."""

    key: Key
    task: str
    worker_id: int
    runtime: Runtime
    """Of the store that has the row."""
    in_body: bool = False
    body_is_over: bool = False
    moved: bool = False
    """The row goes on as another message: a retry, or what replaces this task."""
    is_lost: bool = False
    """Its body has left, and the row was given back."""
    is_revoked: bool = False
    """Somebody has terminated it, and its worker has buried it; its body, in a thread, goes on."""
    result_is_stored: bool = False
    follows: list[Message] = field(default_factory=list)
    """Callbacks, the rest of a chain and the body of a chord, kept by the commit that removes this run's row."""
    claim: Claim | None = None
    """What is to be held for that commit, if it has the body of a chord."""
    end_is_unknown: bool = False
    """An end whose answer was lost may have removed the row."""
    has_ended: bool = False
    """Its end, which was given up once, was written later."""
    traceback: str | None = None
    late: LateLock | None = None
    """How it stands with its lock, where that is written later."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the worker wants to stop, or has ended this run."""


_IN_BODY: ContextVar[tuple[Runtime, Run] | None] = ContextVar("celery_sidejob_durable", default=None)


@contextmanager
def in_body(runtime: Runtime, run: Run) -> Iterator[None]:
    """Make this the durable task that runs here, also for threads that are given the context."""
    token = _IN_BODY.set((runtime, run))
    try:
        yield
    finally:
        _IN_BODY.reset(token)


# -- publishing ------------------------------------------------------------------------------------------------------


def keep(runtime: Runtime, message: Message) -> None:
    """Keep a message and give it to the broker. Once this returns it runs or is in the dead set.

    It is kept in the first of the stores that answers, and the wait for each that does not is bounded: once per pause.
    Raises StoreUnavailableError if none does, or InvalidValueError if another message of this task id is not finished.
    What is not due before `sidejob_timer_horizon` waits in the store. Dying between commit and publication only means
    that the sweeper publishes.
    """
    kept_meanwhile = message.eta is None and not runtime.stores.several and _keep_meanwhile(runtime, message)
    if kept_meanwhile:
        return
    is_unknown = kept_meanwhile is None
    began = time.monotonic()
    store, (kept, tried) = _in_the_first(
        runtime.stores, lambda store, tried: (_keep(store, message, tried, is_unknown=is_unknown), tried)
    )
    if not kept.waits:
        send(store, [replace(message, tried=tried) if tried else message], since=began)


def _keep_meanwhile(runtime: Runtime, message: Message) -> bool | None:
    """Keep a message in the only store, and make it ready for the broker while that writes; then send it.

    False if it is not kept: where the row cannot be sent ahead, and whatever `keep` then finds out. None if the answer
    was lost.
    """
    stores = runtime.stores
    if stores.is_left_alone(runtime):
        return False
    began = time.monotonic()
    sent = durable.send_keep(runtime.connections, message, _waits(runtime), within_s=stores.wait_s)
    if sent is None:
        return False
    try:
        ready = runtime.publisher.make_ready([message])
    except BaseException:  # a time limit strikes
        runtime.connections.let_go(sent)
        raise
    left_s = began + stores.wait_s - time.monotonic()
    try:
        kept = bool(runtime.connections.answer(sent, within_s=left_s))
    except NoAnswer as error:
        stores.failed(runtime, error, after_s=time.monotonic() - began)
        raise
    except OutcomeUnknown:
        return None
    if kept:
        send(runtime, [message], since=began, ready=ready)
    return kept


def keep_again(runtime: Runtime, message: Message) -> None:
    """Keep what a run publishes after its body, in the run's own store, unless its first try has kept it already.

    A store that is away is tried for a lease: Celery takes an errback that cannot be sent for sent, and before 5.7 the
    body of a chord for failed.
    """

    def once() -> Kept | None:
        return runtime.connections.transact(
            "durable-keep", _keeping(runtime, message), single=True, within_s=_patience_s(runtime)
        )

    began = time.monotonic()
    kept = _patiently(runtime, lambda: _repeat(once))
    if kept is not None and not kept.waits:
        send(runtime, [message], since=began)


def lend(runtime: Runtime, message: Message, transaction: Any) -> None:
    """Keep a message in the caller's transaction, and give it to the broker once that is committed.

    Where nobody tells of the commit, and if this process dies before, the sweeper does.
    """
    borrowed: Borrowed = runtime.connections.borrow(transaction)
    began = time.monotonic()
    with borrowed.atomic():
        if durable.keep(borrowed, message, _waits(runtime)) is None:
            raise _taken(message.task_id)

    def committed() -> None:
        row = durable.read(runtime.connections, message.task_id)  # its savepoint may have been rolled back
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

    def keep(store: Runtime, tried: tuple[str, ...]) -> tuple[set[str] | None, tuple[str, ...]]:
        return _keep_all(store, pages, tried, ready, repeated=of_run), tried

    began = time.monotonic()
    store, (waiting, tried) = (runtime, keep(runtime, ())) if of_run else _in_the_first(runtime.stores, keep)
    if waiting is None:
        return  # all are kept, and the sweeper publishes them
    for number, (page, made) in enumerate(zip(pages, ready, strict=True)):
        due = [message for message in page if message.task_id not in waiting]
        if tried:
            due = [replace(message, tried=tried) for message in due]
        since = began + number * PAGE_TAKES_S
        sent = send(store, due, since=since, ready=made if len(due) == len(page) else None)
        if due and not sent and not runtime.publisher.ready:
            return  # the sweeper publishes the rest


def lend_many(runtime: Runtime, messages: Sequence[Message], transaction: Any) -> None:
    """Keep messages in the caller's transaction, and give them to the broker once that is committed."""
    _check_ids(messages)
    pages = list(_pages(messages))
    borrowed: Borrowed = runtime.connections.borrow(transaction)
    began = time.monotonic()
    with borrowed.atomic():
        _keep_pages([borrowed.run] * len(pages), pages, _waits(runtime), repeated=False)

    def committed() -> None:
        for number, page in enumerate(pages):
            ids = [message.task_id for message in page]
            # Its savepoint may have been rolled back, and the sweeper may have been quicker.
            there = durable.unpublished(runtime.connections, ids, horizon_s=runtime.settings.timer_horizon)
            due = [message for message in page if message.task_id in there]
            send(runtime, due, since=began + number * PAGE_TAKES_S)

    borrowed.after_commit(partial(_after_commit, committed))


def go_on(runtime: Runtime, run: Run, message: Message) -> None:
    """Turn the row of a run into that of the message by which it goes on, and publish that when it is due.

    A store that is away is tried for a lease: Celery takes a retry that cannot be sent for a failure. Raises
    LeaseLostError if the row was taken from this run.
    """
    have_lock(runtime, run)
    is_unknown = False
    began = time.monotonic()

    def work(executor: Executor) -> Kept | None:
        return durable.move(executor, message, run.key, _waits(runtime), worker_id=run.worker_id)

    def once() -> Kept | None:
        nonlocal is_unknown
        try:
            return runtime.connections.transact("durable-move", work, single=True, within_s=_patience_s(runtime))
        except OutcomeUnknown:
            is_unknown = True
            raise

    kept = _patiently(runtime, once)
    if kept is None and is_unknown:
        row = durable.read(runtime.connections, run.key[0])
        if row is not None and row.generation == run.key[1] + 1:
            kept = Kept(waits=not row.unpublished, generation=row.generation)
    if kept is None:
        raise _lease_lost(run)
    run.moved = True
    if not kept.waits:
        send(runtime, [replace(message, generation=kept.generation)], since=began)


def send(runtime: Runtime, messages: Sequence[Message], *, since: float, ready: Any = None) -> int:
    """Publish what was kept `since` then, and return how much the broker was given; one that is down costs a while.

    The sweeper looks at such rows only after `FIRST_LOOK_S`, and not at those that a run has begun by then. So the mark
    that they were published has time: those of a second are one statement, and most have nothing left to mark. Dying
    before it means one copy more. Who comes after the sweeper publishes what says that it may be a copy: nothing else
    tells a worker that another one was run and done before it (`late_locks.py`).
    """
    if not messages:
        return 0  # as after most runs
    if time.monotonic() - since > ALONE_S:
        messages, ready = [replace(message, again=True) for message in messages], None
    published = _publish(runtime, messages, ready=ready)
    marks = runtime.connections.put_off(
        "marks", lambda: PutOff("marks of published messages", partial(_mark, runtime, again=False), within_s=MARK_S)
    )
    if published:
        marks.add(published)
        marks.write_if_late()
    return len(published)


def dispatch(runtime: Runtime, messages: Sequence[Message]) -> int:
    """Publish, mark at once what the broker has, and return how many those were."""
    published = runtime.publisher.confirm(_publish(runtime, messages))
    if published:
        try:
            _mark(runtime, published, again=True)
        except StoreUnavailableError as error:
            logger.warning("Published, but could not mark it; it will be published once more: %s", error)
    return len(published)


# -- running ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Ahead:
    """A lock that was sent for a run which begins in this process in a moment; whoever takes it sees to its answer."""

    sent: Sent
    worker_id: int
    is_taken: bool = False


def begin_ahead(
    runtime: Runtime, key: Key, address: Address, *, worker_id: int, pid: int, on_lost: str, max_losses: int
) -> Ahead | None:
    """Send what `begin` sends, for it to have the answer by then; None where `begin` has to ask itself.

    A run that dies in between counts as begun. Where the message may have a copy, or there are several stores, nothing
    is sent.
    """
    if runtime.stores.several or address != NOWHERE or runtime.stores.is_left_alone(runtime):
        return None
    sent = durable.send_begin(
        runtime.connections, key, worker_id=worker_id, pid=pid, on_lost=on_lost, max_losses=max_losses,
        within_s=runtime.stores.wait_s,
    )  # fmt: skip
    return None if sent is None else Ahead(sent, worker_id)


def begin_not(runtime: Runtime, key: Key, ahead: Ahead) -> bool:
    """Give back what was locked ahead of a run that does not begin after all, unless the run has taken it.

    False if the lock may stay, as the store does not answer: then the worker has to know that it runs nothing.
    """
    if ahead.is_taken:
        return True
    ahead.is_taken = True
    within_s = runtime.stores.wait_s
    try:
        if runtime.connections.answer(ahead.sent, within_s=within_s):
            runtime.connections.transact(
                "durable-unlock", lambda executor: durable.unlock(executor, key, worker_id=ahead.worker_id),
                single=True, within_s=within_s,
            )  # fmt: skip
    except StoreUnavailableError as error:
        logger.warning("Task %s was not begun, and is perhaps still locked: %s", key[0], error)
        return False
    return True


def begin(
    runtime: Runtime, run: Run, address: Address = NOWHERE, *, pid: int, on_lost: str, max_losses: int, is_here: bool,
    ahead: Ahead | None = None,
) -> bool:  # fmt: skip
    """Lock the row, or wait for the lock that was sent `ahead`; False for a copy, of which nothing is to run.

    `is_here`: this process runs the task already, so that a lock of its own is that run's and not a lost answer.
    """

    def work(executor: Executor) -> bool:
        begun = durable.begin(
            executor, run.key, worker_id=run.worker_id, pid=pid, on_lost=on_lost, max_losses=max_losses
        )
        if begun and noted:
            twins.note(executor, [(run.key[0], str(address.call))], kept_s=twins.RECENT_S)
        return begun

    def once() -> bool:
        return runtime.connections.transact("durable-begin", work, single=not noted, within_s=within_s)

    noted = copies.is_to_be_noted(address)
    within_s = runtime.stores.wait_s if runtime.stores.several else None
    try:
        if ahead is None:
            begun = once()
        else:
            ahead.is_taken = True
            begun = bool(runtime.connections.answer(ahead.sent))
    except NoAnswer:
        raise  # it would say nothing to a second one either
    except OutcomeUnknown:
        begun = once() or _is_mine(runtime, run, pid=pid, is_here=is_here)
    return begun and _counts(runtime, run, address)


def begin_late(runtime: Runtime, run: Run, *, max_losses: int) -> bool:
    """Let a run begin whose lock is written later; False if it has to lock now."""
    return late_locks.of(runtime).begin(run, max_losses=max_losses)


def end_late(runtime: Runtime, run: Run) -> None:
    """Have the row of such a run removed soon: it has ended well, and nothing follows it."""
    late_locks.of(runtime).end(run)


def have_lock(runtime: Runtime, run: Run) -> None:
    """Have such a run locked now, before it ends in any other way; LeaseLostError if the row is not to be had.

    A store that is away is tried for a lease. Of any other run there is nothing to be done.
    """
    if not has_lock(runtime, run):
        raise _lease_lost(run)


def has_lock(runtime: Runtime, run: Run) -> bool:
    """Do the same, and tell whether it is locked; False once it was refused."""
    return run.late is None or _patiently(runtime, lambda: late_locks.of(runtime).take(run))


def is_kept_somewhere(runtime: Runtime, task_id: str) -> bool:
    """Tell whether some store has the row of a task id; this one is asked first.

    Raises StoreUnavailableError if a store does not answer, and none of the others has it.
    """
    stores = runtime.stores
    failure: StoreUnavailableError | None = None
    for store in (runtime, *stores.others(runtime)):
        if stores.is_left_alone(store):
            failure = StoreUnavailableError(f"{store.where} has not answered a moment ago, and is not asked just now")
            continue
        began = time.monotonic()
        try:
            row = store.connections.read(lambda executor: durable.read(executor, task_id), within_s=stores.wait_s)
        except StoreUnavailableError as error:
            stores.failed(store, error, after_s=time.monotonic() - began)
            failure = error
            continue
        if row is not None:
            return True
    if failure is not None:
        raise failure
    return False


def check_hold() -> None:
    """Raise LeaseLostError if the durable task whose body runs here was taken from this run; nothing outside of one."""
    found = _IN_BODY.get()
    if found is None or found[1].moved:
        return
    runtime, run = found
    if run.late is not None and not late_locks.of(runtime).take(run):
        raise _lease_lost(run)
    row = durable.read(runtime.connections, run.key[0])
    if row is None or (row.generation, row.locked_by) != (run.key[1], run.worker_id):
        raise _lease_lost(run)


def is_to_stop() -> bool:
    """Tell whether the durable task whose body runs here should come to its end; False outside of one."""
    found = _IN_BODY.get()
    return found is not None and found[1].stopping()


def adopt(runtime: Runtime, run: Run, message: Message, *, pid: int, on_lost: str, max_losses: int) -> bool:
    """Keep a message that came without a row, locked for its run; False if it has one, or another delivery made one.

    Its publisher had no extension, or no store that answered; in that case one of them may have it after all.
    """
    address = Address(call=message.call if runtime.stores.several else None, unconfirmed=True)
    noted = copies.is_to_be_noted(address)

    def work(executor: Executor) -> bool:
        adopted = durable.adopt(
            executor, message, worker_id=run.worker_id, pid=pid, on_lost=on_lost, max_losses=max_losses,
            look_after_s=runtime.settings.lost_after,
        )  # fmt: skip
        if adopted and noted:
            twins.note(executor, [(run.key[0], str(address.call))], kept_s=twins.RECENT_S)
        return adopted

    def once() -> bool:
        return runtime.connections.transact("durable-begin", work, single=not noted, within_s=_patience_s(runtime))

    return _repeat(once) and _counts(runtime, run, address)


def _is_mine(runtime: Runtime, run: Run, *, pid: int, is_here: bool) -> bool:
    row = durable.read(runtime.connections, run.key[0])
    mine = (run.key[1], run.worker_id, pid)
    return row is not None and not is_here and (row.generation, row.locked_by, row.locked_pid) == mine


def _counts(runtime: Runtime, run: Run, address: Address) -> bool:
    """Tell whether the copy that was just locked is the one to run; removes it if it is not."""
    if copies.gives_way(runtime, run.key, address, worker_id=run.worker_id):
        return False
    copies.note(runtime, run.key, address)
    return True


def end(runtime: Runtime, run: Run) -> None:
    """Remove the row of a run that ended well, and keep what follows it, in one commit; then publish that.

    A run that was called lost meanwhile, because its worker was silent, takes itself back: it leaves the dead set, or
    does not run again. Raises LeaseLostError if another run has the row or had it since: then nothing that follows
    this one is published.

    A store that is away is tried for a lease, then StoreUnavailableError is raised, and this process goes on trying
    beside its other work. By then the worker may have called the run lost, as it does if this process dies.
    """
    try:
        _end(runtime, run, lambda once: _patiently(runtime, once))
    except StoreUnavailableError:
        _late_ends(runtime).add([run])
        raise


def _late_ends(runtime: Runtime) -> PutOff[Run]:
    return runtime.connections.put_off(
        "ends",
        lambda: PutOff(
            "ends of tasks", partial(_end_late, runtime), within_s=LATE_END_S, patience_s=LATE_END_PATIENCE_S
        ),
    )


def _end_late(runtime: Runtime, runs: Sequence[Run]) -> None:
    claimed: ClaimedElsewhereError | None = None
    for run in runs:
        if run.has_ended:
            continue  # of several one has found the store away again
        try:
            _end(runtime, run, lambda once: once())
        except LeaseLostError as error:
            logger.warning("%s", error)
        except ClaimedElsewhereError as error:
            claimed = error
            continue
        except StoreUnavailableError:
            raise
        except Exception:  # it must not keep the others from their ends; the worker finds what it holds
            logger.exception("The end of task %s cannot be written", run.key[0])
        run.has_ended = True
    if claimed is not None:
        raise claimed


def _end(runtime: Runtime, run: Run, try_: Callable[[Callable[[], bool]], bool]) -> None:
    due: list[Message] = []
    since = 0.0

    def remove(executor: Executor) -> bool:
        return finish(executor, durable.remove(executor, run.key, worker_id=run.worker_id))

    def take_back(executor: Executor) -> bool:
        age_s = None if run.late is None else time.monotonic() - run.late.began_at
        return finish(executor, durable.take_back(executor, run.key, age_s=age_s))

    def finish(executor: Executor, ended: bool) -> bool:
        nonlocal since
        due.clear()
        since = time.monotonic()
        if not ended:
            return False
        for message in run.follows:
            kept = durable.keep(executor, message, _waits(runtime))
            if kept is not None and not kept.waits:
                due.append(message)
        return True

    def once(work: Callable[[Executor], bool]) -> bool:
        if run.claim is not None and not run.claim.hold():
            run.follows = [message for message in run.follows if message not in run.claim.messages]
            run.claim = None
        try:
            return runtime.connections.transact(
                "durable-end", work, single=not run.follows, within_s=_patience_s(runtime)
            )
        except OutcomeUnknown:
            run.end_is_unknown = True
            raise

    reach("durable-end:before")
    # What a run without a lock was refused may be held by another one of the same worker.
    if not has_lock(runtime, run) or not try_(lambda: once(remove)):
        if not run.is_revoked and try_(lambda: once(take_back)):
            runtime.follow(Aftermath(calls=[lambda observer: observer.task_recovered(run.key[0], run.task)]))
        elif not run.end_is_unknown:
            raise _lease_lost(run)
    reach("durable-end:after")
    if run.claim is not None:
        run.claim.settle()
    send(runtime, due, since=since)


def fail(
    runtime: Runtime, key: Key, *, by: str, worker_id: int | None, reason: str, error: str,
    traceback: str | None = None, retries: int = 0, patient: bool = False, address: Address = NOWHERE,
) -> bool:  # fmt: skip
    """Move a row to the dead set, and tell of it once; False if it was somebody else's by then, or is there already.

    Also if the message has a copy that counts, as far as its `address` tells.
    """
    if address.call is not None:
        row = durable.read(runtime.connections, key[0])
        if row is None or row.generation != key[1] or copies.gives_way(runtime, key, address, worker_id=worker_id):
            return False
    noted = copies.is_to_be_noted(address)

    def work(executor: Executor) -> tuple[int, str] | None:
        found = durable.bury(
            executor, key, by=by, worker_id=worker_id, reason=reason, error=storable(error),
            traceback=None if traceback is None else storable(traceback), retries=retries,
        )  # fmt: skip
        if found is not None and noted:
            twins.note(executor, [(key[0], str(address.call))], kept_s=twins.RECENT_S)
        return None if found is None else (found.id, found.task)

    unknown = False

    def once() -> tuple[int, str] | None:
        nonlocal unknown
        try:
            found = runtime.connections.transact("durable-bury", work, single=not noted, within_s=_patience_s(runtime))
        except OutcomeUnknown:
            unknown = True
            raise
        if found is None and unknown:  # the first try may have done it, and nobody was told
            row = durable.buried(runtime.connections, key)
            return None if row is None else (row.id, row.task)
        return found

    buried = _patiently(runtime, once) if patient else _repeat(once)
    if buried is None:
        return False
    number, task = buried
    entry_id = entry_id_of(runtime, number)
    runtime.follow(Aftermath(calls=[lambda observer: observer.task_buried(entry_id, key[0], task, reason)]))
    return True


def poison(runtime: Runtime, key: Key) -> bool:
    """Doom the row of a message that the broker's transport has given up; False if this store knows nothing of it.

    The sweeper tells of the doom and buries it, as of any other. A row that a run holds lives on.
    """
    found = runtime.connections.transact("durable-poison", lambda executor: durable.poison(executor, key), single=True)
    if found.doomed:
        reach("poison:doomed")
    return found.doomed or found.is_kept or durable.buried(runtime.connections, key) is not None


def entry_id_of(runtime: Runtime, number: int) -> int | str:
    """Return by what an entry of the dead set is known: its number, with the store's name before it if that is not
    the primary.
    """
    label = runtime.stores.label_of(runtime)
    return number if label is None else f"{label}:{number}"


def forget(runtime: Runtime, key: Key) -> None:
    """Remove a row that no run holds: its run had ended well after all, or was one without a lock."""
    runtime.connections.transact("durable-end", lambda executor: durable.forget(executor, key), single=True)


def put_back(runtime: Runtime, run: Run) -> None:
    """Give up a run whose message goes back to the broker."""
    _patiently(
        runtime,
        lambda: runtime.connections.transact(
            "durable-unlock", lambda executor: durable.unlock(executor, run.key, worker_id=run.worker_id), single=True
        ),
    )


def give_back(runtime: Runtime, task_ids: Iterable[str], *, worker_id: int, loss: bool, begun: bool = True) -> int:
    """Take runs that were cut off from the worker they ran in, this one: they run again, or go to the dead set.

    Those that were not `begun`, only locked, run again.
    """
    ids = list(task_ids)

    def work(executor: Executor) -> Sequence[Any]:
        return durable.give_back(executor, ids, worker_id=worker_id, loss=loss, begun=begun)

    return _lose(runtime, work)


def take_from_the_dead(runtime: Runtime, limit: int) -> int:
    """Take a page of runs from workers that were declared dead; returns how many."""
    return _lose(runtime, lambda executor: durable.take_from_the_dead(executor, limit))


def revive(runtime: Runtime, entry_ids: Sequence[int]) -> int:
    """Take entries out of the dead set and publish their messages again, in new generations; returns how many."""

    def work(executor: Executor) -> Sequence[Message]:
        return durable.revive(executor, entry_ids, look_after_s=runtime.settings.lost_after)

    messages = runtime.connections.transact("durable-revive", work, single=True)
    dispatch(runtime, messages)
    return len(messages)


def not_revived(entry_id: int | str, task_id: str | None) -> IllegalMoveError:
    """Return why an entry that there is did not leave the dead set."""
    return IllegalMoveError(
        f"Entry {entry_id} of the dead set cannot be retried: a task {task_id} waits or runs already, or somebody "
        "has just retried it."
    )


# --------------------------------------------------------------------------------------------------------------------


def _lose(runtime: Runtime, take: Callable[[Executor], Sequence[Any]]) -> int:
    """Take runs from whoever held them, and tell of those that were lost."""
    taken = runtime.connections.transact("durable-lose", take, single=True, within_s=_patience_s(runtime))
    runtime.follow(
        Aftermath(calls=[partial(_tell_of_loss, task_id=row.task_id, task=row.task) for row in taken if row.loss])
    )
    return len(taken)


def _tell_of_loss(observer: Observer, *, task_id: str, task: str) -> None:
    observer.task_lost(task_id, task)


def _in_the_first(stores: Stores, keep: Callable[[Runtime, tuple[str, ...]], T]) -> tuple[Runtime, T]:
    """Keep something in the first of the stores that answers, and return that too.

    `keep` is told which stores may have it already: those that took it and did not answer.
    """
    tried: list[str] = []
    failure: StoreUnavailableError | None = None
    for store in stores:
        if stores.is_left_alone(store):
            continue
        began = time.monotonic()
        try:
            name = stores.name_of(store) if stores.several else ""
            return store, keep(store, tuple(tried))
        except OutcomeUnknown as error:
            tried.append(name)
            failure = error
        except StoreUnavailableError as error:
            failure = error
        stores.failed(store, failure, after_s=time.monotonic() - began)
    raise failure or stores.all_left_alone()


def _keep(store: Runtime, message: Message, tried: tuple[str, ...], *, is_unknown: bool) -> Kept:
    """Keep a message in one store; `is_unknown`: a try of this very call has had no answer."""
    within_s = store.stores.wait_s
    keeping = _keeping(store, message, tried)

    def once() -> Kept | None:
        nonlocal is_unknown
        try:
            return store.connections.transact("durable-keep", keeping, single=not tried, within_s=within_s)
        except OutcomeUnknown:
            is_unknown = True
            raise

    kept = _repeat(once)
    if kept is None and is_unknown and _is_kept(store, message, within_s):
        return Kept(waits=True)  # by the first of two tries: the sweeper publishes it
    if kept is None:
        raise _taken(message.task_id)
    return kept


def _is_kept(store: Runtime, message: Message, within_s: float) -> bool:
    """Tell whether the row in whose way a message is, is its own; OutcomeUnknown if the store goes away just then."""
    try:
        return store.connections.read(lambda executor: durable.is_kept(executor, message), within_s=within_s)
    except StoreUnavailableError as error:
        raise OutcomeUnknown(f"There is a row of this task id, which may be of this very call: {error}") from error


def _keep_all(
    store: Runtime, pages: Sequence[list[Message]], tried: tuple[str, ...], ready: list[Any], *, repeated: bool
) -> set[str] | None:
    """Keep all pages; returns the ids of those that wait in the store, None if a first try had kept them.

    What is to be sent is made meanwhile, and is in `ready` then: for each page what the publisher has made of it.
    """
    within_s = store.stores.wait_s + len(pages) * PAGE_TAKES_S

    def make_ready(page: list[Message]) -> None:
        # Where there are several stores, a message is told in which it is kept.
        ready.append(None if store.stores.several else store.publisher.make_ready(page))

    def work(executor: OwnExecutor) -> set[str]:
        ready.clear()
        runs = [partial(executor.run_beside, partial(make_ready, page)) for page in pages]
        waiting = _keep_pages(runs, pages, _waits(store), repeated=repeated)
        if tried:
            made = [(message.task_id, message.call) for page in pages for message in page if message.call is not None]
            twins.note(executor, made, tried=tried, kept_s=twins.KEPT_S)
        return waiting

    first = True

    def once() -> set[str] | None:
        nonlocal first
        again, first = not first, False
        if again and store.connections.read(lambda executor: durable.is_kept(executor, pages[0][0]), within_s=within_s):
            return None
        return store.connections.transact("durable-keep", work, within_s=within_s)

    return _repeat(once)


def _keeping(runtime: Runtime, message: Message, tried: tuple[str, ...] = ()) -> Callable[[Executor], Kept | None]:
    def work(executor: Executor) -> Kept | None:
        kept = durable.keep(executor, message, _waits(runtime))
        if kept is not None and tried and message.call is not None:
            twins.note(executor, [(message.task_id, message.call)], tried=tried, kept_s=twins.KEPT_S)
        return kept

    return work


def _repeat(once: Callable[[], T]) -> T:
    """Do what may be repeated again if its answer was lost with its connection; then its outcome stays unknown."""
    try:
        return once()
    except NoAnswer:
        raise
    except OutcomeUnknown as unknown:
        try:
            return once()
        except OutcomeUnknown:
            raise
        except StoreUnavailableError as error:
            raise OutcomeUnknown(f"{unknown} Then: {error}") from error


def _patiently(runtime: Runtime, once: Callable[[], T]) -> T:
    """Do what must not be given up for a store that is away for a moment: tries for a lease."""
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            return once()
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)


def _publish(runtime: Runtime, messages: Sequence[Message], *, ready: Any = None) -> list[Key]:
    if runtime.stores.several and messages:
        try:
            name = runtime.stores.name_of(runtime)
        except StoreUnavailableError as error:
            logger.warning("The sweeper will publish what is kept in a store that does not answer: %s", error)
            return []
        messages = [replace(message, store=name) for message in messages]
    sent = runtime.publisher.publish(messages, ready=ready)
    return [(message.task_id, message.generation) for message in sent if isinstance(message, Message)]


def _mark(runtime: Runtime, published: Sequence[Key], *, again: bool) -> None:
    there = runtime.publisher.confirm(published)
    if there:
        runtime.connections.transact(
            "mark", lambda executor: durable.mark_published(executor, there, again=again), single=True,
            within_s=runtime.stores.wait_s,
        )  # fmt: skip


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
        held_back, taken = durable.keep_many(run, page, waits, publishing_takes_s=number * PAGE_TAKES_S)
        if taken is not None and not repeated:
            raise _taken(taken)
        waiting.update(held_back)
    return waiting


def _patience_s(runtime: Runtime) -> float | None:
    """Return how long what a run does waits for a store that is silent: for ever where there is no other to serve."""
    return runtime.settings.lease if runtime.stores.several else None


def _waits(runtime: Runtime) -> Waits:
    return Waits(runtime.settings.lost_after, runtime.settings.timer_horizon)


def _taken(task_id: str) -> InvalidValueError:
    return InvalidValueError(
        f"task_id={task_id!r} is taken: a durable task of this id waits or runs. Give each call an id of "
        "its own, or none."
    )


def _lease_lost(run: Run) -> LeaseLostError:
    return LeaseLostError(
        f"Task {run.key[0]} was taken from this run: its worker was silent for too long. It runs elsewhere or is in "
        "the dead set."
    )
