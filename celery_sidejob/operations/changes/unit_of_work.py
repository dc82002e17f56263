"""Applying changes: one lock statement (`lock_set`), all judgements under the lock, one commit.

First come the objects: jobs and their names (`family`), ports. Then comes the data (`mailboxes`, state), then the asks
(`wakes`). Asks that could not be made under the lock are noted; they are applied after the commit, when messages of
channels with many subscribers are delivered as well (`follow_up`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...model.changes import (
    Announce,
    Ask,
    CancelTimer,
    Change,
    CloseBatch,
    Connect,
    DependencyChange,
    DependOn,
    Disown,
    FamilyChange,
    FindingChange,
    JoinBatch,
    Log,
    Move,
    NewJob,
    PortChange,
    Publish,
    RememberInputs,
    RemoveAlias,
    SetState,
    StepChange,
    Terminate,
    UnsetState,
    Write,
)
from ...model.errors import JobNotFoundError
from ...store import jobs, steps
from ...store.batches import close as close_batch
from ...store.borrowed.borrowed import Borrowed
from ...store.statement import Transaction
from ..after_commit import AfterCommit
from ..lock_set import KeptPorts, LockSet
from ..runtime import LocalRuntime, Runtime
from . import batches, dependencies, finding, unique_keys
from .family import Family
from .follow_up import follow_commit_of, follow_up
from .mailboxes import Mailboxes
from .wakes import Wakes


def carry_out(runtime: Runtime, name: str, changes: Sequence[Change], transaction: Any = None) -> Applied:
    """Apply changes in one transaction of ours, or as part of the caller's.

    In the caller's transaction, asks are only noted, and a job is locked only for its state. Raises before anything is
    written. If the broker is down, messages are published later.
    """
    if transaction is not None:
        borrowed: Borrowed = runtime.connections.borrow(transaction)
        applied = borrowed.apply(lambda: Applied(runtime, borrowed, changes, noting=True).done())
        follow_commit_of(runtime, borrowed, applied.after_commit)
        return applied
    applied = runtime.connections.transact(name, lambda executor: Applied(runtime, executor, changes).done())
    follow_up(runtime, applied.after_commit, to_the_end=True)
    return applied


class Applied:
    """One transaction's changes: the jobs they affect, their effects, and the work that follows.

    `noting`: the transaction is the caller's, so no other job is locked and asks are only noted. `own`: the job whose
    run this unit belongs to. `kept`: rows of ports that earlier units of the run have read. `bounded`: limits of ports
    apply.
    """

    def __init__(  # noqa: PLR0913 - whose changes, and what they may do
        self,
        runtime: LocalRuntime,
        executor: Transaction,
        changes: Sequence[Change],
        *,
        noting: bool = False,
        own: int | None = None,
        kept: KeptPorts | None = None,
        bounded: bool = True,
    ) -> None:
        self._executor = executor
        self._changes = changes
        self._noting = noting
        self._own = own
        self._history = runtime.settings.history
        self.after_commit = AfterCommit()
        self.lock_set = LockSet(executor, changes, kept)
        self.wakes = Wakes(runtime, executor, self.lock_set, self.after_commit, noting=noting)
        self._family = Family(runtime, executor, self.lock_set, self.after_commit, own=own)
        self.mailboxes = Mailboxes(
            executor, self.lock_set, self.wakes, self.after_commit, noting=noting, bounded=bounded
        )

    def done(self) -> Applied:
        """Lock the affected jobs, and apply everything."""
        self.lock()
        self.apply()
        return self

    def lock(self, also: Iterable[int] = (), *, parents: Mapping[int, int | None] | None = None) -> None:
        """Lock every affected job, and those of `also` and `parents`; when noting, lock only those of `also`."""
        if self.lock_set.new:
            unique_keys.take_turn(self._executor, self.lock_set.new.values())
        if any(isinstance(change, DependOn) for change in self._changes):
            dependencies.take_turn(self._executor)
        if self._noting:
            self.lock_set.look(also)
            return
        try:
            self.lock_set.lock(also, parents=parents)
        except JobNotFoundError:
            unique_keys.check_replaced(self.lock_set)
            raise

    def apply(self) -> None:
        """Apply everything: first objects, then data, then asks, each kind in the order of the changes.

        New jobs are made before the changes that follow them, all at once if no name is freed in between.
        """
        judged: list[Change | None] = []
        for part in _parts(self._changes):
            self._family.create([change for change in part if isinstance(change, NewJob)])
            for change in part:
                self._apply_object(change)
                judged.append(self._judged(change))
        self._write_state()
        entries = [change for change in self._changes if isinstance(change, Log)]
        finding.write_history(self._executor, entries, keep=self._history)
        for one in judged:
            self._apply_data(one)
        self.mailboxes.flush()
        self.wakes.apply()

    def _judged(self, change: Change) -> Change | None:
        """Return the change as it is when it comes; later ones may give the job another parent."""
        if isinstance(change, Ask):
            return self.wakes.addressed(change)
        if isinstance(change, Disown) and change.parent_id != self._own:
            parent = self.lock_set.job(change.parent_id)
            # The parent may wait for the child in a step.
            return Ask(change.parent_id) if parent.has_steps else change
        return change

    def _apply_object(self, change: Change) -> None:
        if isinstance(change, FamilyChange):
            self._family.apply(change)
        elif isinstance(change, PortChange):
            self.mailboxes.apply(change)
        elif isinstance(change, Move):
            if self._family.move(change):
                self.wakes.wake(change.job_id)
        elif isinstance(change, DependencyChange):
            dependencies.apply(self._executor, change, self.lock_set, self.after_commit)
        elif isinstance(change, FindingChange):
            finding.apply(self._executor, change, self.after_commit)
        elif isinstance(change, StepChange):
            steps.apply(self._executor, change, keep=self._history)
        elif isinstance(change, RememberInputs):
            jobs.remember_inputs(self._executor, change.job_id, change.memo)

    def _apply_data(self, change: Change | None) -> None:
        match change:
            case Write() | Publish() | Connect():
                self.mailboxes.write(change)
            case Ask() | CancelTimer() | Terminate():
                self.wakes.add(change)
            case JoinBatch():
                batches.join(self._executor, change)
            case CloseBatch():
                close_batch(self._executor, change.batch_id)
            case Announce():
                self.after_commit.announcements.append((change.channel, change.value))

    def _write_state(self) -> None:
        values: dict[tuple[int, str], str] = {}
        for change in self._changes:
            if isinstance(change, SetState):
                values.update({(change.job_id, key): value for key, value in change.values.items()})
            elif isinstance(change, UnsetState):
                for key in change.keys:
                    values.pop((change.job_id, key), None)
                jobs.remove_state(self._executor, change.job_id, change.keys)
        if values:
            jobs.put_state(self._executor, values)


def _parts(changes: Sequence[Change]) -> Iterator[Sequence[Change]]:
    """Cut the changes where a new job may get a name that another job has had until then."""
    part: list[Change] = []
    frees = False
    for change in changes:
        if frees and isinstance(change, NewJob):
            yield part
            part, frees = [], False
        part.append(change)
        frees = frees or isinstance(change, Disown | RemoveAlias)
    yield part
