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
from typing import Any, TypeVar

from ..model.crash_points import reach
from ..model.durable import Key, Message
from ..model.errors import IllegalMoveError, InvalidValueError, LeaseLostError, StoreUnavailableError
from ..model.protocols import Observer
from ..store import durable
from ..store.borrowed import Borrowed
from ..store.connection import OutcomeUnknown
from ..store.durable import FIRST_LOOK_S, Kept, Waits
from ..store.put_off import PutOff
from ..store.sent import Sent
from ..store.statement import Executor
from .endings import storable
from .hold import PAUSE_S
from .runtime import Aftermath, Runtime

T = TypeVar("T")

logger = logging.getLogger("celery_sidejob")

PAGE = 1000
PAGE_BYTES = 8_000_000
"""How many messages one statement keeps at most, and how large they may be together, but for the last."""
MARK_S = FIRST_LOOK_S / 2
"""How long the mark of a published message may be put off."""
ANSWER_S = 0.1
"""Within which it is looked at what came of a removal that nobody has waited for."""
PAGE_TAKES_S = 1.0
"""How much later the sweeper looks at each further page of one call: so long its publisher may take for a page."""


@dataclass(eq=False, slots=True)
class Run:
    """A run of a durable task in this process, from its lock to its end."""

    key: Key
    task: str
    worker_id: int
    in_body: bool = False
    body_is_over: bool = False
    moved: bool = False
    """The row goes on as another message: a retry, or what replaces this task."""
    is_lost: bool = False
    """Its body has left, and the row was given back."""
    result_is_stored: bool = False
    follows: list[Message] = field(default_factory=list)
    """Callbacks and the rest of a chain, kept by the commit that removes this run's row."""
    end_is_unknown: bool = False
    """Its row may have been removed by an end whose answer was lost."""
    has_ended: bool = False
    """What came of an end that nobody waited for is known, and was seen to."""
    traceback: str | None = None
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


def keep(runtime: Runtime, message: Message, *, repeated: bool = False) -> None:
    """Keep a message and give it to the broker. Once this returns it runs or is in the dead set.

    Raises StoreUnavailableError, or InvalidValueError if another message of this task id is not finished; not with
    `repeated`, which is how a run that was begun again publishes what its first try had published already. What is not
    due before `sidejob_timer_horizon` waits in the store. Dying between commit and publication only means that the
    sweeper publishes.
    """
    if message.eta is None and _keep_meanwhile(runtime, message):
        return

    def work(executor: Executor) -> Kept | None:
        return durable.keep(executor, message, _waits(runtime))

    kept = _repeat(lambda: runtime.connections.transact("durable-keep", work, single=True))
    if kept is None:
        if repeated or durable.is_kept(runtime.connections, message):
            return
        raise _taken(message.task_id)
    if not kept.waits:
        send(runtime, [message])


def _keep_meanwhile(runtime: Runtime, message: Message) -> bool:
    """Keep a message while it is made ready for the broker, which gets it once it is kept; False if it is not.

    That is so where the row cannot be sent ahead, and for whatever `keep` then has to find out.
    """
    sent = durable.send_keep(runtime.connections, message, _waits(runtime))
    if sent is None:
        return False

    def is_kept() -> bool:
        try:
            return bool(runtime.connections.answer(sent))
        except OutcomeUnknown:
            return False

    published = _publish(runtime, [message], is_kept=is_kept)
    if not is_kept():
        return False
    _mark_soon(runtime, published)
    return True


def lend(runtime: Runtime, message: Message, transaction: Any) -> None:
    """Keep a message in the caller's transaction, and give it to the broker once that is committed.

    Where nobody tells of the commit, and if this process dies before, the sweeper does.
    """
    borrowed: Borrowed = runtime.connections.borrow(transaction)
    with borrowed.atomic():
        if durable.keep(borrowed, message, _waits(runtime)) is None:
            raise _taken(message.task_id)

    def committed() -> None:
        row = durable.read(runtime.connections, message.task_id)  # its savepoint may have been rolled back
        if row is not None and row.unpublished:
            send(runtime, [message])

    borrowed.after_commit(partial(_after_commit, committed))


def keep_many(runtime: Runtime, messages: Sequence[Message], *, repeated: bool = False) -> None:
    """Keep messages, all or none in one commit, and give them to the broker, all of a page at once.

    Raises StoreUnavailableError, and InvalidValueError where the task id of one is taken; `repeated` as for `keep`.
    """
    _check_ids(messages)
    pages = list(_pages(messages))

    def work(executor: Executor) -> set[str]:
        return _keep_pages(executor, pages, _waits(runtime), repeated=repeated)

    try:
        waiting = runtime.connections.transact("durable-keep", work)
    except OutcomeUnknown:
        if durable.is_kept(runtime.connections, messages[0]):
            return  # then all are, and the sweeper publishes them
        waiting = runtime.connections.transact("durable-keep", work)
    for page in pages:
        due = [message for message in page if message.task_id not in waiting]
        if due and not send(runtime, due) and not runtime.publisher.ready:
            return  # the sweeper publishes the rest


def lend_many(runtime: Runtime, messages: Sequence[Message], transaction: Any) -> None:
    """Keep messages in the caller's transaction, and give them to the broker once that is committed."""
    _check_ids(messages)
    pages = list(_pages(messages))
    borrowed: Borrowed = runtime.connections.borrow(transaction)
    with borrowed.atomic():
        _keep_pages(borrowed, pages, _waits(runtime), repeated=False)

    def committed() -> None:
        for page in pages:
            ids = [message.task_id for message in page]
            # Its savepoint may have been rolled back, and the sweeper may have been quicker.
            there = durable.unpublished(runtime.connections, ids, horizon_s=runtime.settings.timer_horizon)
            send(runtime, [message for message in page if message.task_id in there])

    borrowed.after_commit(partial(_after_commit, committed))


def go_on(runtime: Runtime, run: Run, message: Message) -> None:
    """Turn the row of a run into that of the message by which it goes on, and publish that when it is due.

    Raises LeaseLostError if the row was taken from this run.
    """

    def work(executor: Executor) -> Kept | None:
        return durable.move(executor, message, run.key, _waits(runtime), worker_id=run.worker_id)

    try:
        kept = runtime.connections.transact("durable-move", work, single=True)
    except OutcomeUnknown:
        kept = _repeat(lambda: runtime.connections.transact("durable-move", work, single=True))
        row = None if kept else durable.read(runtime.connections, run.key[0])
        if row is not None and row.generation == run.key[1] + 1:
            kept = Kept(waits=not row.unpublished, generation=row.generation)
    if kept is None:
        raise _lease_lost(run)
    run.moved = True
    if not kept.waits:
        send(runtime, [replace(message, generation=kept.generation)])


def send(runtime: Runtime, messages: Sequence[Message]) -> int:
    """Publish what was just kept, and return how much the broker has; a broker that is down costs a bounded time.

    The sweeper looks at such rows only after `FIRST_LOOK_S`, and not at those that a run has begun by then. So the mark
    that they were published has time: those of a second are one statement, and most have nothing left to mark. Dying
    before it means one copy more.
    """
    published = _publish(runtime, messages)
    _mark_soon(runtime, published)
    return len(published)


def _mark_soon(runtime: Runtime, published: list[Key]) -> None:
    marks = runtime.connections.put_off(
        "marks", lambda: PutOff("marks of published messages", partial(_mark, runtime), within_s=MARK_S)
    )
    if published:
        marks.add(published)
        marks.write_if_late()


def dispatch(runtime: Runtime, messages: Sequence[Message]) -> int:
    """Publish, mark at once what the broker has, and return how many those were."""
    published = runtime.publisher.confirm(_publish(runtime, messages))
    if published:
        try:
            _mark(runtime, published)
        except StoreUnavailableError as error:
            logger.warning("Published, but could not mark it; it will be published once more: %s", error)
    return len(published)


# -- running ---------------------------------------------------------------------------------------------------------


def begin_ahead(runtime: Runtime, key: Key, *, worker_id: int, pid: int, on_lost: str, max_losses: int) -> Sent | None:
    """Send what `begin` sends, for it to have the answer by then: a run that dies in between counts as begun."""
    return durable.send_begin(
        runtime.connections, key, worker_id=worker_id, pid=pid, on_lost=on_lost, max_losses=max_losses
    )


def begin(
    runtime: Runtime, run: Run, *, pid: int, on_lost: str, max_losses: int, is_here: bool, ahead: Sent | None = None
) -> bool:
    """Lock the row, or wait for the lock that was sent `ahead`; False for a copy, of which nothing is to run.

    `is_here`: this process runs the task already, so that a lock of its own is that run's and not a lost answer.
    """

    def work(executor: Executor) -> bool:
        return durable.begin(
            executor, run.key, worker_id=run.worker_id, pid=pid, on_lost=on_lost, max_losses=max_losses
        )

    try:
        if ahead is not None:
            return bool(runtime.connections.answer(ahead))
        return runtime.connections.transact("durable-begin", work, single=True)
    except OutcomeUnknown:
        if runtime.connections.transact("durable-begin", work, single=True):
            return True
        hear_of_ends(runtime)  # or the lock may be that of a run of this process which has ended
        row = durable.read(runtime.connections, run.key[0])
        mine = (run.key[1], run.worker_id, pid)
        return row is not None and not is_here and (row.generation, row.locked_by, row.locked_pid) == mine


def check_hold() -> None:
    """Raise LeaseLostError if the durable task whose body runs here was taken from this run; nothing outside of one."""
    found = _IN_BODY.get()
    if found is None or found[1].moved:
        return
    runtime, run = found
    row = durable.read(runtime.connections, run.key[0])
    if row is None or (row.generation, row.locked_by) != (run.key[1], run.worker_id):
        raise _lease_lost(run)


def is_to_stop() -> bool:
    """Tell whether the durable task whose body runs here should come to its end; False outside of one."""
    found = _IN_BODY.get()
    return found is not None and found[1].stopping()


def adopt(runtime: Runtime, run: Run, message: Message, *, pid: int, on_lost: str, max_losses: int) -> bool:
    """Keep a message of a publisher without this package, locked for its run; False if another delivery did."""

    def work(executor: Executor) -> bool:
        return durable.adopt(
            executor, message, worker_id=run.worker_id, pid=pid, on_lost=on_lost, max_losses=max_losses,
            look_after_s=runtime.settings.lost_after,
        )  # fmt: skip

    return _repeat(lambda: runtime.connections.transact("durable-begin", work, single=True))


def end(runtime: Runtime, run: Run) -> None:
    """Remove the row of a run that ended well, and keep what follows it, in one commit; then publish that.

    A run that was called lost meanwhile, because its worker was silent, takes itself back: it leaves the dead set, or
    does not run again. Raises LeaseLostError if another run has the row or had it since: then nothing that follows
    this one is published.

    Where nothing follows, nobody waits for the removal: Postgres has it whole when this returns, and removes the row
    though this process should die now. What else came of it is seen to by whoever finds that out, within `ANSWER_S`.
    """
    reach("durable-end:before")
    sent = None
    if not run.follows:
        sent = durable.send_removal(runtime.connections, run.key, worker_id=run.worker_id)
    if sent is None:
        _patiently(runtime, lambda: _end(runtime, run))
        return
    reach("durable-end:sent")
    _ends(runtime).add([(run, sent)])


def _end(runtime: Runtime, run: Run) -> None:
    due: list[Message] = []

    def remove(executor: Executor) -> bool:
        return finish(executor, durable.remove(executor, run.key, worker_id=run.worker_id))

    def take_back(executor: Executor) -> bool:
        return finish(executor, durable.take_back(executor, run.key))

    def finish(executor: Executor, ended: bool) -> bool:
        due.clear()
        if not ended:
            return False
        for message in run.follows:
            kept = durable.keep(executor, message, _waits(runtime))
            if kept is not None and not kept.waits:
                due.append(message)
        return True

    def once(work: Callable[[Executor], bool]) -> bool:
        try:
            return runtime.connections.transact("durable-end", work, single=not run.follows)
        except OutcomeUnknown:
            run.end_is_unknown = True
            raise

    if not once(remove):
        if once(take_back):
            runtime.follow(Aftermath(calls=[lambda observer: observer.task_recovered(run.key[0], run.task)]))
        elif not run.end_is_unknown:
            raise _lease_lost(run)
    reach("durable-end:after")
    send(runtime, due)


def _ends(runtime: Runtime) -> PutOff[tuple[Run, Sent]]:
    """Return the ends that were sent and are still to be heard of; a store that is away is tried for a lease."""
    return runtime.connections.put_off(
        "ends",
        lambda: PutOff(
            "ends of runs", partial(_hear_of_ends, runtime), within_s=ANSWER_S, patience_s=runtime.settings.lease
        ),
    )


def _hear_of_ends(runtime: Runtime, ends: Sequence[tuple[Run, Sent]]) -> None:
    """See to it that rows are removed. Nearly always they are; the few others are ended anew, as if nothing was sent.

    A process that dies here has nothing to lose but the ends that Postgres has failed at.
    """
    for run, sent in ends:
        if run.has_ended:
            continue  # a store that was away for another of them has them tried again together
        try:
            run.has_ended = bool(runtime.connections.answer(sent))
        except OutcomeUnknown:
            run.end_is_unknown = True
        if not run.has_ended:
            try:
                _end(runtime, run)
            except LeaseLostError as error:
                logger.warning("%s", error)
            run.has_ended = True


def hear_of_ends(runtime: Runtime) -> None:
    """Wait until all is known of the ends that this process has sent, if the store is there."""
    _ends(runtime).write_now()


def fail(
    runtime: Runtime, key: Key, *, by: str, worker_id: int | None, reason: str, error: str,
    traceback: str | None = None, retries: int = 0, patient: bool = False,
) -> bool:  # fmt: skip
    """Move a row to the dead set, and tell of it once; False if it was somebody else's by then, or is there already."""

    def work(executor: Executor) -> tuple[int, str] | None:
        found = durable.bury(
            executor, key, by=by, worker_id=worker_id, reason=reason, error=storable(error),
            traceback=None if traceback is None else storable(traceback), retries=retries,
        )  # fmt: skip
        return None if found is None else (found.id, found.task)

    def once() -> tuple[int, str] | None:
        return runtime.connections.transact("durable-bury", work, single=True)

    buried = _patiently(runtime, once) if patient else _repeat(once)
    if buried is None:
        return False
    entry_id, task = buried
    runtime.follow(Aftermath(calls=[lambda observer: observer.task_buried(entry_id, key[0], task, reason)]))
    return True


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


def give_back(runtime: Runtime, task_ids: Iterable[str], *, worker_id: int, loss: bool) -> int:
    """Take runs that were cut off from the worker they ran in, this one: they run again, or go to the dead set."""
    ids = list(task_ids)

    def work(executor: Executor) -> Sequence[tuple[str, str]]:
        rows = durable.give_back(executor, ids, worker_id=worker_id, loss=loss)
        return [(row.task_id, row.task) for row in rows]

    taken = runtime.connections.transact("durable-lose", work, single=True)
    if loss:
        _tell_of_losses(runtime, taken)
    return len(taken)


def take_from_the_dead(runtime: Runtime, limit: int) -> int:
    """Take a page of runs from workers that were declared dead; returns how many."""

    def work(executor: Executor) -> Sequence[tuple[str, str]]:
        return [(row.task_id, row.task) for row in durable.take_from_the_dead(executor, limit)]

    taken = runtime.connections.transact("durable-lose", work, single=True)
    _tell_of_losses(runtime, taken)
    return len(taken)


def revive(runtime: Runtime, entry_ids: Sequence[int]) -> int:
    """Take entries out of the dead set and publish their messages again, in new generations; returns how many."""

    def work(executor: Executor) -> Sequence[Message]:
        return durable.revive(executor, entry_ids, look_after_s=runtime.settings.lost_after)

    messages = runtime.connections.transact("durable-revive", work, single=True)
    dispatch(runtime, messages)
    return len(messages)


def not_revived(entry_id: int, task_id: str | None) -> IllegalMoveError:
    """Return why an entry that there is did not leave the dead set."""
    return IllegalMoveError(
        f"Entry {entry_id} of the dead set cannot be retried: a task {task_id} waits or runs already, or somebody "
        "has just retried it."
    )


# --------------------------------------------------------------------------------------------------------------------


def _tell_of_losses(runtime: Runtime, lost: Iterable[tuple[str, str]]) -> None:
    runtime.follow(Aftermath(calls=[partial(_tell_of_loss, task_id=task_id, task=task) for task_id, task in lost]))


def _tell_of_loss(observer: Observer, *, task_id: str, task: str) -> None:
    observer.task_lost(task_id, task)


def _repeat(once: Callable[[], T]) -> T:
    """Do what may be repeated again if its answer was lost."""
    try:
        return once()
    except OutcomeUnknown:
        return once()


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


def _publish(runtime: Runtime, messages: Sequence[Message], *, is_kept: Callable[[], bool] | None = None) -> list[Key]:
    sent = runtime.publisher.publish(messages, is_kept=is_kept)
    return [(message.task_id, message.generation) for message in sent if isinstance(message, Message)]


def _mark(runtime: Runtime, published: Sequence[Key]) -> None:
    there = runtime.publisher.confirm(published)
    if there:
        runtime.connections.transact("mark", lambda executor: durable.mark_published(executor, there), single=True)


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


def _keep_pages(executor: Executor, pages: Iterable[list[Message]], waits: Waits, *, repeated: bool) -> set[str]:
    """Keep all, or raise; returns the ids of those that wait in the store."""
    waiting: set[str] = set()
    for number, page in enumerate(pages):
        held_back, taken = durable.keep_many(executor, page, waits, publishing_takes_s=number * PAGE_TAKES_S)
        if taken is not None and not repeated:
            raise _taken(taken)
        waiting.update(held_back)
    return waiting


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
