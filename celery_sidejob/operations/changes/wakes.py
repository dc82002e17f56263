"""Asks, timers and terminations of one transaction: collected in order, then applied."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from ...model.changes import Ask, CancelTimer, Log, Terminate
from ...model.durable import Death
from ...model.events import JobBuried
from ...model.status import ASKABLE, Status
from ...store import asks, dead, history, ports, trees
from ..lock_set import LockSet
from .deletion import is_being_deleted
from .dependencies import mark_ended

REASONS = {"WorkerLostError": "lost", "TaskRevokedError": "revoked"}
"""The reason for a job's entry in the dead set, by its error; other errors have `failed`."""
ENDING = frozenset({Status.TERMINATING, Status.TERMINATED})
WAKES = ("ask", "note ask", "look", "note look")
"""Kinds of entries that may change places with each other."""
NOTED = {"ask": "run", "note ask": "run", "note look": "look"}
"""As what the asks of jobs that are not locked are noted."""
ENDED = frozenset({Status.FAILED, Status.TERMINATED})
"""Statuses from which an ask revives a job (recorded in its history)."""


class Wakes:
    """The asks of the affected jobs. If nothing is locked, they are only noted, and judged afterwards."""

    def __init__(self, lock_set: LockSet) -> None:
        self._check_interval_s = lock_set.settings.lost_after
        self._history = lock_set.settings.history
        self._executor = lock_set.executor
        self._lock_set = lock_set
        self._after_commit = lock_set.after_commit
        self._noting = lock_set.noting
        self._in_order: list[tuple[str, Any]] = []
        """Kinds, each with the id of a job; with the change itself for a timer, and for one that is cancelled."""
        self.found: set[int] = set()
        """Timers that were cancelled; other timers had fired, or were removed by a termination."""
        self.refused: set[int] = set()
        """Jobs whose status allows no ask, and jobs without a parent whose parent was to be asked."""

    # -- collecting ----------------------------------------------------------------------------------------------

    def addressed(self, change: Ask) -> Ask | None:
        """Return the ask for the job that is meant: the present parent, if `of_parent`. None if there is no parent."""
        if not change.of_parent:
            return change
        parent = self._lock_set.parents.get(change.job_id)
        if parent is None:
            self.refused.add(change.job_id)
            return None
        return replace(change, job_id=parent, of_parent=False)

    def add(self, change: Ask | CancelTimer | Terminate) -> None:
        """Add a change, to be applied in its order."""
        if isinstance(change, CancelTimer):
            self._in_order.append(("cancel", change))
        elif isinstance(change, Terminate):
            self._in_order.append(("terminate_tree" if change.tree else "terminate", change.job_id))
        elif change.due_at is not None or (change.wait_s or 0) > 0:
            self._in_order.append(("timer", change))
        else:
            self._in_order.append(("force" if change.force else "ask", change.job_id))

    def wake(self, job_id: int, *, looks: bool = False, noted: bool = False) -> None:
        """Ask a job, in order, to run and read its new data; it is only `noted` for a job that is not locked.

        If it only `looks`, a job that has completed the steps of its last asking is not woken: it would do them again.
        """
        kind = "look" if looks else "ask"
        self._in_order.append((f"note {kind}" if noted else kind, job_id))

    # -- applying ------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Apply asks and terminations in their order; one statement applies neighbours of the same kind."""
        for kind, entries in groupby(list(self._by_kind()), itemgetter(0)):
            self._apply_batch(kind, [of for _, of in entries])
        self._in_order = []

    def _by_kind(self) -> Iterator[tuple[str, Any]]:
        """Yield the entries in their order, but wakes that follow each other sorted: only one of them wakes a job."""
        for are_wakes, entries in groupby(self._in_order, lambda entry: entry[0] in WAKES):
            if not are_wakes:
                yield from entries
                continue
            found = list(entries)
            asked = {job_id for kind, job_id in found if kind == "ask"}
            yield from sorted(
                (one for one in found if one[0] != "look" or one[1] not in asked),
                key=lambda entry: WAKES.index(entry[0]),
            )

    def ask(self, ids: Sequence[int], *, force: bool = False, late_s: float = 0.0) -> None:
        """Ask locked jobs to run, due since `late_s` seconds; jobs that may not be asked are then in `refused`."""
        may = [job_id for job_id in ids if self._may_ask(job_id, force=force)]
        self.refused.update(set(ids) - set(may))
        if not may:
            return
        for row in asks.ask(self._executor, may, force=force, check_interval_s=self._check_interval_s, late_s=late_s):
            self._moved(row.id, row.status, row.changes)
            self._after_commit.ring(self._lock_set.job(row.id), row)

    def terminate(self, ids: Sequence[int], *, tree: bool, timers_before: int | None = None) -> None:
        """Make locked jobs terminating; terminated jobs stay terminated."""
        for row in asks.terminate(
            self._executor, ids, tree=tree, check_interval_s=self._check_interval_s, timers_before=timers_before
        ):
            self._moved(row.id, Status.TERMINATING, row.changes)
            self._after_commit.ring(self._lock_set.job(row.id), row)

    def apply_due(self, job_id: int) -> None:
        """Apply the due timers of a locked job, in the order in which they were set.

        A timer was accepted when it was set. A later failure does not cancel it; only a termination does, by deleting
        it. Asks noted by a borrowed transaction are judged now, even if they are for later.
        """
        for timer in asks.take_due(self._executor, job_id):
            status = self._lock_set.statuses[job_id]
            if timer.later is not None:
                if self._may_ask(job_id, force=timer.ask == "force"):
                    after = asks.accept(self._executor, job_id, timer)
                    self._moved(job_id, after.status, after.changes)
            elif timer.ask.startswith("terminate"):
                if timer.ask == "terminate_tree":
                    # Locking the subtree now could break the ascending order: it has its own transactions.
                    self._terminate_below([job_id])
                self.terminate([job_id], tree=timer.ask == "terminate_tree", timers_before=timer.id)
            elif timer.ask == "look":
                self._look([job_id])
            elif (
                timer.ask == "force"
                or status in ASKABLE
                or (timer.accepted and status == Status.FAILED and timer.ask == "run")
            ):
                self.ask([job_id], force=timer.ask == "force" or status == Status.FAILED, late_s=timer.late_s)

    def _apply_batch(self, kind: str, of: Sequence[Any]) -> None:  # noqa: PLR0912 - an arm for each kind
        if kind == "timer":
            for change in of:
                self._set_timer(change)
            return
        if kind == "cancel":
            for change in of:
                self._cancel(change)
            return
        ids: Sequence[int] = list(dict.fromkeys(of))
        if kind.startswith("note ") or self._noting:
            self._note_batch(kind, ids)
        elif kind == "terminate_tree":
            self._terminate_trees(ids)
        elif kind == "terminate":
            self._apply_noted(ids)  # a plain termination does not cancel a noted recursive termination
            self.terminate(ids, tree=False)
        elif kind == "force":
            self._apply_noted(ids)  # otherwise an earlier noted termination would win
            self.ask(ids, force=True)
        elif kind == "look":
            self._look(self._made_before(ids))
        else:
            self.ask(self._made_before(ids))

    def _note_batch(self, kind: str, ids: Sequence[int]) -> None:
        noted = NOTED.get(kind, kind)
        late = self._made_before(ids) if noted in ("run", "look") else ids
        asks.note(self._executor, late, noted)
        self._after_commit.noted += late

    def _apply_noted(self, ids: Sequence[int]) -> None:
        for job_id in ids:
            self.apply_due(job_id)

    def _made_before(self, ids: Sequence[int]) -> Sequence[int]:
        """Leave out jobs whose first run is owed by being new."""
        return [job_id for job_id in ids if not self._just_created(job_id)]

    def _look(self, ids: Sequence[int]) -> None:
        completed = {job_id for job_id in ids if self._lock_set.statuses[job_id] == Status.COMPLETED}
        self.ask([job_id for job_id in ids if job_id not in completed or self._lock_set.job(job_id).has_steps is None])

    def _may_ask(self, job_id: int, *, force: bool) -> bool:
        """Tell whether the job may be asked now. An unfinished termination reaches no child of a forced run."""
        status = self._lock_set.statuses[job_id]
        if not force or self._noting:
            return force or status in ASKABLE
        if status == Status.TERMINATED and is_being_deleted(self._executor, job_id):
            return False
        if status in ENDING or self._lock_set.job(job_id).parent_id is not None:
            trees.split_places(self._executor, [job_id])
        return True

    def _terminate_trees(self, ids: Sequence[int]) -> None:
        large = [job_id for job_id in ids if job_id in self._lock_set.large]
        small = [job_id for job_id in ids if job_id not in self._lock_set.large]
        if large:
            # From now on the roots take no new children. If this process dies after the commit, the sweeper continues.
            self.terminate(large, tree=True)
            self._terminate_below(large)
        if small:
            below = [row.id for row in trees.subtree(self._executor, small)]
            unlocked = {job_id for job_id in below if not self._lock_set.knows(job_id)}
            if unlocked:  # adopted in this very transaction, or since the tree was read
                self._after_commit.trees |= trees.begin_termination(self._executor, unlocked, itself=True)
            self.terminate([job_id for job_id in below if job_id not in unlocked], tree=True)

    def _terminate_below(self, ids: Sequence[int]) -> None:
        self._after_commit.trees |= trees.begin_termination(self._executor, ids, itself=False)

    def _set_timer(self, change: Ask) -> None:
        job_id, force = change.job_id, change.force
        if not self._may_ask(job_id, force=force):
            self.refused.add(job_id)
        elif self._noting:
            asks.note(self._executor, [job_id], change.kind, due_at=change.due_at, wait_s=change.wait_s or 0.0)
            self._after_commit.noted.append(job_id)
        else:
            after = asks.set_timer(self._executor, job_id, due_at=change.due_at, wait_s=change.wait_s, ask=change.kind)
            self._moved(job_id, after.status, after.changes)

    def _cancel(self, change: CancelTimer) -> None:
        """Remove a timer; a job queued only for it rests as before, but a terminated job is terminated again."""
        if not asks.cancel_timer(self._executor, change.job_id, change.timer_id):
            return
        self.found.add(change.timer_id)
        rested = asks.rest(self._executor, change.job_id)
        if rested is None:
            return
        if rested.status == Status.TERMINATED:
            self.terminate([change.job_id], tree=False)
            return
        self._moved(change.job_id, rested.status, rested.changes)
        if rested.has_dependents:
            mark_ended(self._executor, change.job_id, rested.status, self._after_commit)
        if rested.status == Status.FAILED:
            self._bury(change.job_id, rested)

    def _bury(self, job_id: int, rested: Any) -> None:
        """Enter a failed job in the dead set again: asking for a forced run had taken it out."""
        error = json.loads(rested.error)
        text, reason = f"{error['type']}: {error['message']}", REASONS.get(error["type"], "failed")
        death = Death(reason, text, error.get("traceback"), rested.retries)
        entry = dead.bury(self._executor, job_id, death, task_id=rested.task_id)
        self._after_commit.events.append(JobBuried(job_id, self._lock_set.job(job_id).task, entry, reason))

    def _just_created(self, job_id: int) -> bool:
        """Whether the job is new and its first run, which no worker can have claimed yet, is owed at once."""
        new = self._lock_set.new.get(job_id)
        if new is None or new.due_at is not None or new.wait_s:
            return False
        return self._lock_set.statuses[job_id] == Status.QUEUED

    def _moved(self, job_id: int, after: str, change: int) -> None:
        before = self._lock_set.statuses[job_id]
        self._lock_set.statuses[job_id] = after
        if before == Status.TERMINATED and after != before:
            ports.subscribe(self._executor, job_id)
        if before in ENDED and after == Status.QUEUED and self._history:
            told = Log(job_id, "revived", json.dumps({"from": before}), time.monotonic())
            history.log(self._executor, [told], keep=self._history)
        self._after_commit.moved(self._lock_set.job(job_id), before, after, change)
