"""Applying changes: one lock statement (`lock_set`), all judgements under the lock, one commit.

First come the objects: jobs and their names (`family`), ports. Then comes the data (`mailboxes`, state), then the asks
(`wakes`). Asks that could not be made under the lock are noted; they are applied after the commit, when messages of
channels with many subscribers are delivered as well (`follow_up`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...model import changes
from ...model.errors import JobNotFoundError
from ...store import history, jobs, steps
from ...store.batches import close as close_batch
from ...store.borrowed.borrowed import Borrowed
from ...store.statement import Transaction
from ..hold import Hold, check_fence
from ..lock_set import KeptPorts, LockSet
from ..runtime import LocalRuntime, Runtime
from . import batches, dependencies, unique_keys
from .family import Family
from .follow_up import follow_commit_of, follow_up
from .mailboxes import Mailboxes
from .wakes import Wakes


def carry_out(runtime: Runtime, name: str, given: Sequence[changes.Change], transaction: Any = None) -> Applied:
    """Apply changes in one transaction of ours, or as part of the caller's.

    In the caller's transaction, asks are only noted, and a job is locked only for its state. Raises before anything is
    written. If the broker is down, messages are published later.
    """
    if transaction is not None:
        borrowed: Borrowed = runtime.connections.borrow(transaction)
        applied = borrowed.apply(lambda: Applied(runtime, borrowed, given, noting=True).done())
        follow_commit_of(runtime, borrowed, applied.after_commit)
        return applied
    applied = runtime.connections.transact(name, lambda executor: Applied(runtime, executor, given).done())
    follow_up(runtime, applied.after_commit, to_the_end=True)
    return applied


class Applied:
    """One transaction's changes: the jobs they affect, their effects, and the work that follows.

    `noting`: the transaction is the caller's, so no other job is locked and asks are only noted. `hold`: the run whose
    unit this is; limits of ports do not apply in a shutdown. `kept`: rows of ports that earlier units of the run have
    read.
    """

    def __init__(
        self,
        runtime: LocalRuntime,
        executor: Transaction,
        given: Sequence[changes.Change],
        *,
        noting: bool = False,
        hold: Hold | None = None,
        kept: KeptPorts | None = None,
    ) -> None:
        self._executor = executor
        self._changes = given
        self._hold = hold
        self._own = None if hold is None else hold.job_id
        self._history = runtime.settings.history
        self.lock_set = LockSet(runtime, executor, given, kept, noting=noting)
        self.after_commit = self.lock_set.after_commit
        self.wakes = Wakes(self.lock_set)
        self._family = Family(self.lock_set, own=self._own)
        bounded = hold is None or hold.kind != "shutdown"
        self.mailboxes = Mailboxes(self.lock_set, self.wakes, bounded=bounded)

    def done(self) -> Applied:
        """Lock the affected jobs, and apply everything."""
        self.lock()
        self.apply()
        return self

    def lock(self, *, parents: Mapping[int, int | None] | None = None, any_unit: bool = False) -> None:
        """Lock every affected job, and those of `parents`; when noting, only the job whose run this unit belongs to.

        Raises LeaseLostError if that run is no longer current; `any_unit`: see `check_fence`.
        """
        if self.lock_set.new:
            unique_keys.take_turn(self._executor, self.lock_set.new.values())
        if any(isinstance(change, changes.DependOn) for change in self._changes):
            dependencies.take_turn(self._executor)
        own = () if self._own is None else (self._own,)
        try:
            if self.lock_set.noting:
                self.lock_set.look(own)
            else:
                self.lock_set.lock(own, parents=parents)
        except JobNotFoundError:
            unique_keys.check_replaced(self.lock_set)
            self._check_fence(any_unit=any_unit)  # the job of a zombie may have been deleted
            raise
        self._check_fence(any_unit=any_unit)

    def _check_fence(self, *, any_unit: bool) -> None:
        if self._hold is not None:
            check_fence(self._hold, self.lock_set.rows.get(self._hold.job_id), any_unit=any_unit)

    def apply(self) -> None:
        """Apply everything: first objects, then data, then asks, each kind in the order of the changes.

        New jobs are made before the changes that follow them, all at once if no name is freed in between.
        """
        judged: list[changes.Change | None] = []
        for part in _parts(self._changes):
            self._family.create([change for change in part if isinstance(change, changes.NewJob)])
            for change in part:
                self._apply_object(change)
                judged.append(self._judged(change))
        self._write_state()
        self._write_history()
        for one in judged:
            self._apply_data(one)
        self.mailboxes.flush()
        self.wakes.apply()

    def _judged(self, change: changes.Change) -> changes.Change | None:
        """Return the change as it is when it comes; later ones may give the job another parent."""
        if isinstance(change, changes.Ask):
            return self.wakes.addressed(change)
        if isinstance(change, changes.Disown) and change.parent_id != self._own:
            parent = self.lock_set.job(change.parent_id)
            # The parent may wait for the child in a step.
            return changes.Ask(change.parent_id) if parent.has_steps else change
        return change

    def _apply_object(self, change: changes.Change) -> None:
        if isinstance(change, changes.FamilyChange | changes.FindingChange):
            self._family.apply(change)
        elif isinstance(change, changes.PortChange):
            self.mailboxes.apply(change)
        elif isinstance(change, changes.Move):
            if self._family.move(change):
                self.wakes.wake(change.job_id)
        elif isinstance(change, changes.DependencyChange):
            dependencies.apply(change, self.lock_set)
        elif isinstance(change, changes.StepChange):
            steps.apply(self._executor, change, keep=self._history)
        elif isinstance(change, changes.RememberInputs):
            jobs.remember_inputs(self._executor, change.job_id, change.memo)

    def _apply_data(self, change: changes.Change | None) -> None:
        match change:
            case changes.Write() | changes.Publish() | changes.Connect():
                self.mailboxes.write(change)
            case changes.Ask() | changes.CancelTimer() | changes.Terminate():
                self.wakes.add(change)
            case changes.JoinBatch():
                batches.join(self._executor, change)
            case changes.CloseBatch():
                close_batch(self._executor, change.batch_id)
            case changes.Announce():
                self.after_commit.announcements.append((change.channel, change.value))

    def _write_state(self) -> None:
        values: dict[tuple[int, str], str] = {}
        for change in self._changes:
            if isinstance(change, changes.SetState):
                values.update({(change.job_id, key): value for key, value in change.values.items()})
            elif isinstance(change, changes.UnsetState):
                for key in change.keys:
                    values.pop((change.job_id, key), None)
                jobs.remove_state(self._executor, change.job_id, change.keys)
        if values:
            jobs.put_state(self._executor, values)

    def _write_history(self) -> None:
        """Write new entries of jobs into their histories: of each job the last ones, as many as are kept."""
        kept: dict[int, deque[changes.Log]] = {}
        for change in self._changes:
            if isinstance(change, changes.Log):
                kept.setdefault(change.job_id, deque(maxlen=self._history)).append(change)
        if kept and self._history:
            history.log(self._executor, [one for entries in kept.values() for one in entries], keep=self._history)


def _parts(given: Sequence[changes.Change]) -> Iterator[Sequence[changes.Change]]:
    """Cut the changes where a new job may get a name that another job has had until then."""
    part: list[changes.Change] = []
    frees = False
    for change in given:
        if frees and isinstance(change, changes.NewJob):
            yield part
            part, frees = [], False
        part.append(change)
        frees = frees or isinstance(change, changes.Disown | changes.RemoveAlias)
    yield part
