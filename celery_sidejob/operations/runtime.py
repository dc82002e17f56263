"""What every operation needs: the store, and the ways out to the broker, the result backend and the observers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..model.changes import NewJob
from ..model.errors import StoreUnavailableError
from ..model.messages import Continuation, Doorbell, Outcome
from ..model.protocols import Observer, Publication, Publisher, Refused, Results, Tasks
from ..model.settings import Settings
from ..model.status import Status
from ..store import askings
from ..store.connection.connections import Connections
from ..store.outbox.arming import FIRST_CHECK_S
from ..store.outbox.continuations import remove as remove_continuations
from ..store.outbox.kinds import JOBS
from ..store.outbox.publishing import mark_published
from ..store.write_behind import WriteBehind
from .stores import Stores

logger = logging.getLogger("celery_sidejob")

MARK_S = FIRST_CHECK_S / 2
"""How long the mark of a published message may be put off: the sweeper checks a fresh row only later than that."""


class Move(NamedTuple):
    """A job moved from one status to another; of a run's own move also which run it was, and for which asking."""

    job_id: int
    task: str
    before: str | None
    after: str
    run_no: int | None = None
    task_id: str | None = None


@dataclass(slots=True)
class Aftermath:
    """What follows a commit, collected while the transaction is open and carried out after it.

    If the process dies in between, nothing is lost: doorbells, continuations, outcomes and noted asks are rows, which
    the sweeper finds. Announcements are the only thing that is then missing.
    """

    doorbells: list[Doorbell] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    noted: list[int] = field(default_factory=list)
    published: list[tuple[str, str]] = field(default_factory=list)
    calls: list[Callable[[Observer], None]] = field(default_factory=list)

    def created(self, new: NewJob, row: Any) -> None:
        """Announce a job that was inserted, and have its doorbell rung unless its first run waits for its time."""
        self.moves.append(Move(new.id, new.task, None, Status.QUEUED))
        if row.for_run is not None:
            self.doorbells.append(Doorbell.of(new.id, new, row, new.options))

    def ring(self, job: Any, armed: Any) -> None:
        """Have the doorbell of a job's message rung that was just armed: (task_id, for_run, options)."""
        self.doorbells.append(Doorbell.of(job.id, job, armed, armed.options))


@dataclass(frozen=True, slots=True)
class Runtime:
    """One of an app's stores, with the app's publisher, results and observer."""

    settings: Settings
    connections: Connections
    publisher: Publisher
    results: Results
    observer: Observer
    tasks: Tasks
    stores: Stores = field(default_factory=Stores)
    """All stores that durable tasks may be in, this one among them."""
    place: int = 0
    """Which of them this one is; 0 is the primary."""
    later: Callable[[Callable[[], None]], None] | None = None
    """Has something done by another thread, for one that may use nothing but the store; None for all others."""

    @property
    def where(self) -> str:
        """What this store is called before its name is known: the setting it comes from."""
        return f"Store {self.place} of sidejob_failover_urls" if self.place else "The store of sidejob_database_url"

    def called(self, service: str) -> str:
        """Return what a service of this store is called in logs and among threads."""
        return f"{service}-{self.place}" if self.place else service

    def follow(self, aftermath: Aftermath) -> None:
        """Carry out what follows a commit, or have it carried out."""
        if self.later is not None:
            able = replace(self, later=None)
            self.later(lambda: able.follow(aftermath))
            return
        for move in aftermath.moves:
            if move.before != move.after:
                self.observer.status_changed(*move)
        for call in aftermath.calls:
            call(self.observer)
        self.dispatch(aftermath.doorbells, aftermath.continuations, marks_later=self.connections.may_write_behind)
        for channel, message in aftermath.published:
            self.observer.published(channel, message)
        self.settle(aftermath.outcomes)

    def dispatch(
        self, doorbells: Iterable[Doorbell], continuations: Iterable[Continuation] = (), *,
        refused: Refused | None = None, marks_later: bool = False,
    ) -> int:  # fmt: skip
        """Publish, mark what the broker has, and return how many those were; `refused` is given what no queue takes.

        Dying before the mark only means that the sweeper publishes once more; the claim drops the copy. With
        `marks_later` the doorbells of a second are marked by one statement; most of their runs have begun by then.
        """
        waiting: list[Publication] = [*continuations, *doorbells]
        if not waiting:
            return 0
        sent = self.publisher.publish(waiting, refused=refused)
        rung = [(message.job_id, message.for_run) for message in sent if isinstance(message, Doorbell)]
        continued = [message.key for message in sent if isinstance(message, Continuation)]
        try:
            if rung and marks_later:
                marks = self.connections.write_behind(
                    "rings", lambda: WriteBehind("marks of doorbells", self._mark, within_s=MARK_S)
                )
                marks.add(rung)
                marks.write_if_late()
            elif rung:
                self._mark(rung)
            if continued:
                self.connections.transact(
                    "mark", lambda executor: remove_continuations(executor, continued), single=True
                )
        except StoreUnavailableError as error:
            logger.warning("Published, but could not mark it; it will be published once more: %s", error)
        return len(sent)

    def _mark(self, rung: Sequence[tuple[int, int]]) -> None:
        self.connections.transact("mark", lambda executor: mark_published(executor, JOBS, rung), single=True)

    def settle(self, outcomes: Iterable[Outcome]) -> int:
        """Bring outcomes to the result backend, mark those it has, and return how many those were."""
        stored = [outcome.task_id for outcome in outcomes if self.results.store(outcome)]
        if stored:
            try:
                self.connections.transact("settle", lambda executor: askings.mark_stored(executor, stored), single=True)
            except StoreUnavailableError as error:
                logger.warning("Stored results, but could not mark them; they will be stored once more: %s", error)
        return len(stored)
