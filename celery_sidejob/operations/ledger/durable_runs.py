"""A durable task's run, as its process knows it, and the lock of its row.

The run owns the row from its beginning to its end, or until it loses the row. Any program that reaches the broker can
name a row. So a delivery must have the task and body of its row.

The order is lock, body, result, then removal together with keeping the follow-ups
(`durable_ends.py`). `docs/durable.md` explains the effect of a death in each gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Literal, Protocol

from ...model import native
from ...model.durable import NOWHERE, Address, Content, Held, Key, Message, Terms, digest_of
from ...model.errors import LeaseLostError
from ...model.events import Measure, Measured, TaskLost, TaskRescued, TaskReturned
from ...model.logger import logger
from ...model.loss import Loss
from ...model.protocols import Rider
from ...store.connection.connections import repeat
from ...store.errors import NoAnswer, OutcomeUnknown
from ...store.outbox import burials, holds, tasks
from ...store.outbox.arming import TaskEnd, end_task_runs
from ...store.results import Ended
from ...store.statement import Transaction
from .. import deduplication
from ..after_commit import tell
from ..gates import queues
from ..gates.queues import AtGateError
from ..runtime import Runtime, patiently


class Claim(Protocol):
    """The right to publish the body of a chord. The result backend gives it to one process at a time, for a while."""

    messages: Sequence[Message]
    """The chord's body, among the follow-ups of the run that holds the right."""

    def hold(self) -> bool | None:
        """Extend the right; False if another process has published the body instead.

        None while this is undecided: another process has the right now, or the result backend does not answer.
        """

    def settle(self) -> None:
        """Have the backend forget the chord, whose body is kept; never raises. If we die before, it expires."""


class Untold(Protocol):
    """A success that was not reported to the result backend yet, or whose chord has no body yet."""

    is_told: bool
    """Whether the result is stored, and the part of a chord is counted."""

    @property
    def is_part(self) -> bool:
        """Whether the run is a part of a chord."""

    def tell(self) -> bool:
        """Report it; False while the backend is unreachable, or another process owes the chord's body. Never raises."""


@dataclass(eq=False, slots=True)
class Run:
    """A run of a durable task in this process, from its lock to its end."""

    key: Key
    task: str
    worker_id: int
    runtime: Runtime
    """The runtime of the store that has the row."""
    content: Content
    """The task and body that the run executes."""
    in_body: bool = False
    body_is_over: bool = False
    moved: bool = False
    """Whether the row goes on as another message: a retry, or a replacement of the task."""
    is_counted: bool = False
    """Whether it is a part of a chord that Redis counts. Its entry stays in the dead set: its chord has failed by then.
    """
    is_lost: bool = False
    """Whether the run does not count: its body was aborted and the row given back, or the row was taken from the run.
    """
    is_revoked: bool = False
    """Whether the run was terminated and buried by its worker; its body, in a thread, goes on."""
    error: BaseException | None = None
    """The error that the body has raised, if that is the task's failure."""
    is_told: bool = False
    """Whether the result backend has an outcome, or will get it: then it gets no other."""
    untold: Untold | None = None
    """The success that the end must report to the backend first."""
    follows: list[Message] = field(default_factory=list)
    """Callbacks, the rest of a chain and the body of a chord, which the commit that removes this run's row keeps."""
    riders: list[Rider] = field(default_factory=list)
    """The result and the chord's part that the commit of the end writes, if the result backend is the store."""
    claim: Claim | None = None
    """The right to hold until that commit, if the run publishes the body of a chord."""
    has_waited: bool = False
    """Whether the end has waited for an unavailable store as long as an end may."""
    end_is_unknown: bool = False
    """Whether an end whose answer was lost may have removed the row."""
    has_ended: bool = False
    """Whether the end was written later, after it had been given up once."""
    traceback: str | None = None
    slot_in: str | None = None
    """The managed queue in which the end of this run frees a slot."""
    pool: str | None = None
    """The capacity pool in which the end of this task frees a slot."""
    queue: str | None = None
    """The queue of its row; None until it is known."""
    waited_s: float | None = None
    """Seconds from the moment it was due to its beginning; None until they are known."""
    began_at: float = field(default_factory=time.monotonic)
    """When it began, by the monotonic clock."""
    is_held: bool = False
    """Whether the worker has held its row since it fetched the message."""
    held_at: datetime | None = None
    """The number of the hold: see `Held`. None if the end of the run must free a slot."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the worker wants to stop, or has ended this run."""


_BODY: ContextVar[Run | Literal["inline"] | None] = ContextVar("celery_sidejob_durable", default=None)
"""The run whose body runs here; "inline" for a body without a run."""


def in_body(run: Run | None) -> AbstractContextManager[None]:
    """Make the block the body of a run, also in threads that run in this context.

    None: the body of a task that is called as a function or eagerly, which has no row. Inside the body of a run, such a
    body belongs to that run.
    """
    return native.within(_BODY, run or _BODY.get() or "inline")


def current() -> Run | Literal["inline"] | None:
    """Return the run whose body runs here; "inline" in a body without a run, None outside of bodies."""
    return _BODY.get()


def is_to_stop() -> bool:
    """Tell whether the durable task whose body runs here should end soon; False outside of a body."""
    run = _BODY.get()
    return isinstance(run, Run) and run.stopping()


def lease_lost(run: Run) -> LeaseLostError:
    return LeaseLostError(
        f"Task {run.key[0]} was taken from this run: its worker was silent for too long. It runs elsewhere or is in "
        "the dead set."
    )


# -- the lock of a run -------------------------------------------------------------------------------------------------


def begin(runtime: Runtime, run: Run, address: Address = NOWHERE, *, terms: Terms, is_here: bool) -> bool:
    """Lock the row; False if the delivery must not run: it is a copy, or forged.

    Raises `AtGateError` if the gate of its managed queue is closed: its message waits there now.

    `is_here`: this process already runs the task. Then a lock of this process belongs to that run, and is not the
    effect of a lost answer.
    """

    def work(executor: Transaction) -> bool:
        begun = holds.begin(executor, run.key, run.content, worker_id=run.worker_id, terms=terms)
        if begun is None:
            return False
        _note_begun(run, begun)
        if begun.pool is None and runtime.patience_s is None:
            run.held_at = begun.locked_at
        deduplication.note_in(executor, run.key, address)
        return True

    def once() -> bool:
        return runtime.connections.transact("durable-begin", work, single=not noted, within_s=within_s)

    noted = deduplication.is_to_be_noted(address)
    within_s = None if runtime.patience_s is None else runtime.wait_s
    try:
        begun = once()
    except NoAnswer:
        raise  # a second try would get no answer either
    except OutcomeUnknown:
        begun = once() or _is_mine(runtime, run, pid=terms.pid, is_here=is_here)
    if not begun:
        begun = _begin_by_permit(runtime, run, terms)
    return begun and _counts(runtime, run, address)


def adopt(runtime: Runtime, run: Run, message: Message, terms: Terms) -> bool:
    """Keep a message that came without a row, locked for its run; False if it has a row, or another delivery made one.

    Raises `AtGateError` like `begin`, and also if the row now waits for a slot of its pool.

    Its publisher did not have this package, or no store answered it; then a store may have its row after all.
    """
    address = deduplication.unconfirmed(runtime, message)
    noted = deduplication.is_to_be_noted(address)

    def work(executor: Transaction) -> bool | None:
        begun = holds.adopt(
            executor, message, worker_id=run.worker_id, terms=terms, check_interval_s=runtime.settings.lost_after
        )
        if begun is not None:
            deduplication.note_in(executor, run.key, address)
        return begun

    def once() -> bool | None:
        return runtime.connections.transact("durable-begin", work, single=not noted, within_s=runtime.patience_s)

    begun = repeat(once)
    if begun is False:
        begun = begin(runtime, run, terms=terms, is_here=False)
        if not begun and message.admission is not None:
            raise AtGateError(f"task {run.key[0]} waits for a slot of capacity pool {message.admission.pool.name}")
    run.queue = message.queue
    return bool(begun) and _counts(runtime, run, address)


def check_hold() -> bool:
    """Raise LeaseLostError if the row was taken from the durable task whose body runs here; False outside of a body."""
    run = current()
    if run is None or run == "inline" or run.moved:
        return run is not None
    row = tasks.read(run.runtime.connections, run.key[0])
    if row is None or (row.generation, row.locked_by) != (run.key[1], run.worker_id):
        raise lease_lost(run)
    return True


def put_back(runtime: Runtime, run: Run) -> None:
    """Give up a run whose message goes back to the broker, or is sent again if it was acknowledged for its hold."""
    unlock = partial(end_task_runs, end=holds.unlock(run.key, worker_id=run.worker_id, is_sent_again=run.is_held))
    patiently(runtime, lambda: runtime.connections.transact("durable-unlock", unlock, single=True))


def hold(
    runtime: Runtime, received: Sequence[holds.Fresh], *, worker_id: int, over: Sequence[Ended]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Hold the rows of repeatable tasks, and remove the rows of runs that are `over`; see `holds.hold`."""
    hold = partial(holds.hold, received=received, worker_id=worker_id, over=over)
    return runtime.connections.transact("durable-hold", hold, single=True, within_s=runtime.patience_s)


def unhold(runtime: Runtime, runs: Sequence[Held]) -> None:
    """Give up rows that a worker has held since it fetched their messages, if their runs have not begun.

    They are published again, unless their messages go back to the broker or begin otherwise before. If this process
    dies before it has woken the workers, they find these messages with their next look at whole queues.
    """
    unhold = partial(end_task_runs, end=holds.unhold(runs))
    back = runtime.connections.transact("durable-unlock", unhold, single=True)
    runtime.publisher.ring_queues([row.queue for row in back])


def give_back(runtime: Runtime, task_ids: Iterable[str], *, worker_id: int, loss: Loss, begun: bool = True) -> int:
    """Take back runs that this worker holds and no longer executes: the tasks run again, or go to the dead set.

    Runs that were only locked, not `begun`, are no losses and run again.
    """
    return len(_lose(runtime, holds.give_back(task_ids, worker_id=worker_id, loss=loss, begun=begun)))


def doom(runtime: Runtime, held: Held, content: Content, loss: Loss) -> None:
    """Take back a run that is not to be repeated, whatever its task allows; the sweeper buries it, and tells of it."""

    def work(executor: Transaction) -> None:
        end_task_runs(executor, holds.give_back([held.task_id], worker_id=held.worker_id, loss=loss, begun=True))
        burials.keep_from_others(executor, (held.task_id, held.generation), content, for_s=0.0, entry_too=False)

    runtime.connections.transact("durable-doom", work)


def take_from_the_dead(runtime: Runtime) -> int:
    """Take a page of runs from workers that were declared dead; returns their number."""
    taken = _lose(runtime, holds.take_from_the_dead())
    tell(runtime, *(TaskReturned(row.task_id, row.task) for row in taken if row.goes_on and not row.loss))
    return len(taken)


# --------------------------------------------------------------------------------------------------------------------


def _begin_by_permit(runtime: Runtime, run: Run, terms: Terms) -> bool:
    begun, run.slot_in, waits = queues.begin_task(runtime, run.key, run.content, worker_id=run.worker_id, terms=terms)
    if waits:
        raise AtGateError(f"task {run.key[0]} waits at the gate of its queue")
    if begun is None:
        return False
    _note_begun(run, begun)
    return True


def _note_begun(run: Run, begun: Any) -> None:
    run.pool, run.queue, run.waited_s = begun.pool, begun.queue, begun.waited_s


def _is_mine(runtime: Runtime, run: Run, *, pid: int, is_here: bool) -> bool:
    row = tasks.read(runtime.connections, run.key[0])
    mine = (run.key[1], run.worker_id, pid)
    if row is None or is_here or (row.generation, row.locked_by, row.locked_pid) != mine:
        return False
    return not is_forged(runtime, run.key, run.content)  # in another thread the true message may have the lock


def _counts(runtime: Runtime, run: Run, address: Address) -> bool:
    """Tell whether the copy that was just locked is the one that counts; remove it if it is not."""
    if deduplication.gives_way(runtime, run.key, address, worker_id=run.worker_id):
        return False
    deduplication.note(runtime, run.key, address)
    return True


def _lose(runtime: Runtime, end: TaskEnd) -> Sequence[Any]:
    """Take runs from their holders, and report the lost ones."""
    lose = partial(end_task_runs, end=end)
    taken = runtime.connections.transact("durable-lose", lose, single=True, within_s=runtime.patience_s)
    for row in taken:
        if row.loss:
            rescued = [TaskRescued(row.task_id, row.task)] if row.goes_on else []
            doomed = [] if row.goes_on else [Measured(row.queue, row.task, Measure.FAILURE)]
            loss = Loss.of_json(row.last_loss).redacted(runtime.settings.redacted)
            lost = TaskLost(row.task_id, row.task, loss.why, loss.facts)
            tell(runtime, lost, *rescued, Measured(row.queue, row.task, Measure.LOSS), *doomed)
    return taken


# -- the content of a delivery -----------------------------------------------------------------------------------------


def as_kept(runtime: Runtime, key: Key, content: Content) -> Content:
    """Return the content of a delivery in the form of its row; a compressed row's body is read for this."""
    if content.unpack is None:
        return content
    row = tasks.content_of(runtime.connections, key, whole=True)
    digest = content.digest
    if row is not None and row.digest != digest:
        try:
            if digest_of(content.unpack(bytes(row.body))) == digest:
                digest = row.digest
        except Exception as error:  # it is compressed in another way, or not at all
            logger.debug("The row of task %s is not compressed as a delivery says: %r", key[0], error)
    return Content(content.task, digest)


def is_forged(runtime: Runtime, key: Key, content: Content) -> bool:
    """Tell, and log, whether a delivery that is not run names a waiting or running row with another content."""
    row = tasks.content_of(runtime.connections, key)
    if row is None or (row.task, row.digest) == as_kept(runtime, key, content)[:2]:
        return False
    logger.error(
        "A message with the id of task %s is forged, and rejected: it would run %s, and the task is %s%s",
        key[0],
        content.task,
        row.task,
        "" if row.task != content.task else " with another body",
        extra={"task_id": key[0], "task": row.task},
    )
    return True
