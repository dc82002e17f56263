"""The work that follows a commit: reports events, publishes messages, stores results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..model.changes import NewJob
from ..model.durable import Key, Message
from ..model.errors import StoreUnavailableError
from ..model.events import Event, JobMoved
from ..model.logger import logger
from ..model.messages import Continuation, Doorbell, Outcome
from ..model.names import LOG_CHANNEL, channel_ancestors
from ..model.protocols import Publication, Refused, Rider
from ..model.status import Status
from ..store import asks
from ..store.outbox import references
from ..store.outbox.arming import FIRST_CHECK_S
from ..store.outbox.doorbells import remove_continuations
from ..store.outbox.kinds import JOBS, TASKS, Kind
from ..store.outbox.publishing import mark_published
from ..store.write_behind import WriteBehind
from . import deduplication
from .runtime import Runtime

MARK_S = FIRST_CHECK_S / 2
"""Seconds for which marking a published message may be delayed: the sweeper checks a fresh row only later."""


def result_of(riders: Sequence[Rider]) -> Any | None:
    """Return the result that the statement of an end keeps, if riders would write only that; else None."""
    return riders[0].alone if len(riders) == 1 else None


LOG_AND_ABOVE = frozenset(channel_ancestors(LOG_CHANNEL))


@dataclass(slots=True)
class AfterCommit:
    """The work that follows a commit, collected while the transaction is open.

    If the process dies before the work is done, only the events are lost. Doorbells, continuations, outcomes, noted
    asks, publications and the unfinished parts of large trees are rows, which the sweeper finds.
    """

    events: list[Event] = field(default_factory=list)
    doorbells: list[Doorbell] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    riders: list[Rider] = field(default_factory=list)
    """Results that the commit wrote."""
    noted: list[int] = field(default_factory=list)
    looks: set[int] = field(default_factory=set)
    """Jobs for which to check whether they still wait for other jobs."""
    trees: set[int] = field(default_factory=set)
    """Roots of large trees that are to be terminated, a page in each transaction."""
    published: dict[str, int] = field(default_factory=dict)
    """How many ports take the messages of each channel."""
    undelivered: set[str] = field(default_factory=set)
    """The channels whose messages are kept and must be delivered next."""
    announcements: list[tuple[str, str]] = field(default_factory=list)
    """Published messages: (channel, JSON text)."""
    pools: set[str] = field(default_factory=set)
    """The capacity pools in which waiting jobs may have got slots."""
    tracking_changed: bool = False
    """Whether a job has become tracked or untracked."""
    log_kept: bool = False
    """Whether a port that subscribes to the log was made."""

    def created(self, new: NewJob, row: Any) -> None:
        """Note a new job: its event, and its doorbell unless the first run is due later."""
        self.events.append(JobMoved(new.id, new.task, None, Status.QUEUED, 0))
        self._ring(new, row, new.options)

    def silence(self, job_id: int) -> None:
        """Drop the doorbell of a job whose message waits after all."""
        self.doorbells = [bell for bell in self.doorbells if bell.job_id != job_id]

    def ports_changed(self, ports: Iterable[Any]) -> None:
        """Note whether one of these ports keeps the log: then this process asks for listeners again."""
        self.log_kept = self.log_kept or any(not LOG_AND_ABOVE.isdisjoint(port.channels) for port in ports)

    def moved(
        self, job: Any, before: str, after: str, change: int, run_no: int | None = None, task_id: str | None = None
    ) -> None:
        """Note the event of a job's move, if it moved; `change` is the job's `changes` after the move."""
        if before != after:
            self.events.append(JobMoved(job.id, job.task, before, after, change, run_no, task_id))

    def ring(self, job: Any, armed: Any) -> None:
        """Have the doorbell rung for a job's message that was just armed: (task_id, for_run, options).

        If its run is not due (these are None), the job may wait for a slot of its pool.
        """
        self._ring(job, armed, armed.options)

    def _ring(self, job: Any, armed: Any, options: str | None) -> None:
        if armed.for_run is not None:
            self.doorbells.append(Doorbell.of(job.id, job, armed, options))
        elif job.pool is not None:
            self.pools.add(job.pool)


def follow(runtime: Runtime, after_commit: AfterCommit) -> None:
    """Do the work that follows a commit, at once or in the thread that the runtime names."""

    def carry_out() -> None:
        if after_commit.tracking_changed:
            runtime.tracking.has_changed()
        # Moves come first: a receiver learns of the failure before it learns of the burial.
        for event in sorted(after_commit.events, key=lambda event: not isinstance(event, JobMoved)):
            runtime.observer.tell(event)
        if after_commit.log_kept or after_commit.announcements:
            announce(runtime, after_commit)
        dispatch(
            runtime,
            after_commit.doorbells,
            after_commit.continuations,
            armed_now=True,
            marks_later=runtime.connections.may_write_behind,
        )
        for rider in after_commit.riders:
            rider.committed()
        if after_commit.outcomes:
            settle(runtime, after_commit.outcomes)

    runtime.after_commit(carry_out)


def leave_to_sweeper(error: Exception, text: str, *facts: Any) -> None:
    """Log that the sweeper does what could not be done, with the traceback of an error that is no outage."""
    logger.warning(f"{text}: %s", *facts, error, exc_info=not isinstance(error, StoreUnavailableError))


def tell(runtime: Runtime, *events: Event) -> None:
    """Report committed events, when no other work follows the commit."""
    if events:
        follow(runtime, AfterCommit(events=list(events)))


def announce(runtime: Runtime, after_commit: AfterCommit) -> None:
    """Announce the published messages to the present listeners."""
    if after_commit.log_kept:
        runtime.audience.has_changed()
    for channel, text in after_commit.announcements:
        runtime.announcer.announce(channel, text)


def dispatch(
    runtime: Runtime,
    doorbells: Iterable[Doorbell],
    continuations: Iterable[Continuation] = (),
    *,
    refused: Refused | None = None,
    marks_later: bool = False,
    armed_now: bool = False,
) -> int:
    """Publish messages, mark those that the broker has, and return their number.

    Messages that no queue takes are added to `refused`. If the process dies before the mark, the sweeper publishes once
    more, and the claim drops the copy. With `marks_later` one statement marks all doorbells of one second; most of
    their runs have begun by then. `armed_now`: the preceding transaction has armed the rows. If the store is the
    broker, that transaction has also sent them.
    """
    bells, in_store = list(doorbells), 0
    if bells and runtime.connections.is_broker:
        in_store = len(bells) if armed_now else _send(runtime, bells)
        runtime.publisher.ring(bells)
        bells = []
    waiting: list[Publication] = [*continuations, *bells]
    if not waiting:
        return in_store
    sent = runtime.publisher.publish(waiting, refused=refused)
    rung = [(message.job_id, message.for_run) for message in sent if isinstance(message, Doorbell)]
    continued = [message.key for message in sent if isinstance(message, Continuation)]
    mark(runtime, JOBS, rung, later=marks_later)
    if continued:
        with _once_more():
            runtime.connections.transact("mark", partial(remove_continuations, keys=continued), single=True)
    return in_store + len(sent)


def mark(
    runtime: Runtime, kind: Kind, published: Sequence[tuple[Any, int]], *, later: bool, again: bool = True
) -> None:
    """Mark the rows of messages that the broker has; if that fails, the sweeper publishes the messages once more.

    `later`: one statement writes all marks of one second; most rows are gone by then. `again`: see `mark_published`.
    """

    def write(keys: Sequence[tuple[Any, int]]) -> None:
        marking = partial(mark_published, kind=kind, published=keys, again=again)
        runtime.connections.transact("mark", marking, single=True, within_s=runtime.wait_s)

    if not published:
        return
    if later:
        name = f"marks of {kind}"
        marks = runtime.connections.write_behind(name, lambda: WriteBehind(name, write, within_s=MARK_S))
        marks.add(published)
        marks.write_if_late(len(published))
    else:
        with _once_more():
            write(published)


def settle(runtime: Runtime, outcomes: Iterable[Outcome]) -> int:
    """Store outcomes in the result backend, mark the stored ones, and return their number."""
    stored = [outcome.task_id for outcome in outcomes if runtime.results.deliver(outcome)]
    if stored:
        try:
            runtime.connections.transact("settle", lambda executor: asks.mark_stored(executor, stored), single=True)
        except StoreUnavailableError as error:
            logger.warning("Stored results, but could not mark them; they will be stored once more: %s", error)
    return len(stored)


def _send(runtime: Runtime, doorbells: Sequence[Doorbell]) -> int:
    """Put the messages of jobs into the queues of the store that is the broker; return how many."""
    runs = [(bell.job_id, bell.for_run) for bell in doorbells]
    return len(runtime.connections.transact("publish", partial(references.send_jobs, runs=runs), single=True))


@contextmanager
def _once_more() -> Iterator[None]:
    try:
        yield
    except StoreUnavailableError as error:
        logger.warning("Published, but could not mark it; it will be published once more: %s", error)


# -- messages of durable tasks -----------------------------------------------------------------------------------------


def publish_kept(runtime: Runtime, messages: Sequence[Message]) -> int:
    """Publish kept messages; returns how many the broker took. A broker that is down costs some time.

    The sweeper checks such rows only after `FIRST_CHECK_S`, and skips those that a run has begun by then. The mark of
    publication may therefore wait: one statement writes all marks of one second, and most rows are gone by then. A
    death before the mark costs one more copy, and so does a publisher that is slower than the sweeper.

    If the store is the broker, the rows were kept together with references, and workers are only woken.
    """
    queues: dict[str, None] = {}
    unsent: list[Message] = []
    for message in messages:
        if sends(runtime, message):
            queues[message.queue] = None
        else:
            unsent.append(message)
    if queues:
        runtime.publisher.ring_queues(list(queues))
    if not unsent:
        return len(messages)  # all or none, as after most runs
    published = _give_to_broker(runtime, unsent)
    mark(runtime, TASKS, published, later=True, again=False)
    return len(messages) - len(unsent) + len(published)


def sends(runtime: Runtime, message: Message) -> bool:
    """Tell whether the statement that keeps this message also sends it: the store is the broker."""
    return runtime.connections.is_broker and message.priority is not None


def publish_and_mark(runtime: Runtime, messages: Sequence[Message], *, refused: Refused | None = None) -> int:
    """Publish due messages, mark at once those that the broker took, and return their number.

    If the store is the broker, they get references there instead.
    """
    referred = _refer(runtime, messages) if runtime.connections.is_broker and messages else set()
    messages = [message for message in messages if (message.task_id, message.generation) not in referred]
    published = _give_to_broker(runtime, messages, refused=refused)
    mark(runtime, TASKS, published, later=False)
    return len(referred) + len(published)


def _refer(runtime: Runtime, messages: Sequence[Message]) -> set[Key]:
    """Put references to messages into their queues in the store that is the broker; return the keys of those messages.

    The publisher handles the others: an exchange routes them, or they are unreadable.
    """
    own = runtime.publisher.to_own_queue(messages)
    try:
        runtime.connections.transact("publish", lambda executor: references.send_tasks(executor, own), single=True)
    except StoreUnavailableError as error:
        logger.warning("Could not send what was kept; the sweeper does it: %s", error)
    runtime.publisher.ring(own)
    return {(message.task_id, message.generation) for message in own}


def _give_to_broker(runtime: Runtime, messages: Sequence[Message], *, refused: Refused | None = None) -> list[Key]:
    """Give messages to the broker in order; return the keys of the messages that it took."""
    try:
        messages = deduplication.addressed(runtime, messages)
    except StoreUnavailableError as error:
        logger.warning("The sweeper will publish messages kept in a store that does not answer: %s", error)
        return []
    sent = runtime.publisher.publish(messages, refused=refused)
    return [(message.task_id, message.generation) for message in sent if isinstance(message, Message)]
