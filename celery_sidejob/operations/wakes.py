"""Asks, timers and terminations of one transaction: collected in their order, then applied."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..model.changes import Ask, CancelTimer, Log, Terminate
from ..model.events import JobBuried
from ..model.status import ASKABLE, Status
from ..store import asks, dead, ports, tree_terminations, trees
from ..store.statement import Transaction
from . import finding
from .after_commit import AfterCommit
from .being_deleted import is_being_deleted
from .dependencies import mark_ended
from .lock_set import LockSet
from .runtime import LocalRuntime

REASONS = {"WorkerLostError": "lost", "TaskRevokedError": "revoked"}
"""Why a job is in the dead set, by its error; others have `failed`."""
ENDING = frozenset({Status.TERMINATING, Status.TERMINATED})
ENDED = frozenset({Status.FAILED, Status.TERMINATED})
"""What an ask revives a job from; its history tells of it."""


class Wakes:
    """The asks of the affected jobs. `noting`: nothing is locked, so asks are only noted and judged afterwards."""

    def __init__(
        self, runtime: LocalRuntime, executor: Transaction, lock_set: LockSet, after_commit: AfterCommit, *,
        noting: bool = False,
    ) -> None:  # fmt: skip
        self._check_interval_s = runtime.settings.lost_after
        self._history = runtime.settings.history
        self._executor = executor
        self._lock_set = lock_set
        self._after_commit = after_commit
        self._noting = noting
        self._steps: list[tuple[str, int]] = []
        self._timed: list[Ask] = []
        self._cancelled: list[CancelTimer] = []
        self.found: set[int] = set()
        """Timers that were cancelled; others had fired, or were removed by a termination."""
        self.refused: set[int] = set()
        """Jobs whose status allows no ask, and jobs without a parent whose parent was to be asked."""

    # -- collecting ----------------------------------------------------------------------------------------------

    def addressed(self, change: Ask) -> Ask | None:
        """Return the ask of the job that is meant: of the parent that a job has now. None if it has none."""
        if not change.of_parent:
            return change
        parent = self._lock_set.parents.get(change.job_id)
        if parent is None:
            self.refused.add(change.job_id)
            return None
        return replace(change, job_id=parent, of_parent=False)

    def add(self, change: Ask | CancelTimer | Terminate) -> None:
        """Add a change, to be applied in its turn."""
        if isinstance(change, CancelTimer):
            self._steps.append(("cancel", len(self._cancelled)))
            self._cancelled.append(change)
            return
        if isinstance(change, Terminate):
            self._steps.append(("terminate_tree" if change.tree else "terminate", change.job_id))
        elif change.due_at is not None or (change.wait_s or 0) > 0:
            self._steps.append(("timer", len(self._timed)))
            self._timed.append(change)
        else:
            self._steps.append(("force" if change.force else "ask", change.job_id))

    def wake(self, job_id: int) -> None:
        """Ask a job, in its turn, to run and look at its new data."""
        self._steps.append(("ask", job_id))

    def note(self, job_id: int) -> None:
        """Note that a job which is not locked is to run."""
        self._steps.append(("note", job_id))

    # -- applying ------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Apply asks and terminations in their order; neighbours of one kind are one statement."""
        batch: list[int] = []
        kind = ""
        for step, job_id in [*self._steps, ("", 0)]:
            if step != kind:
                self._apply_batch(kind, list(dict.fromkeys(batch)))
                kind, batch = step, []
            batch.append(job_id)
        self._steps = []

    def ask(self, ids: Sequence[int], *, force: bool = False, late_s: float = 0.0) -> None:
        """Ask locked jobs to run, due since `late_s` seconds; those that may not be asked are in `refused` then."""
        may = [job_id for job_id in ids if self._may_ask(job_id, force=force)]
        self.refused.update(set(ids) - set(may))
        if not may:
            return
        for row in asks.ask(self._executor, may, force=force, check_interval_s=self._check_interval_s, late_s=late_s):
            self._moved(row.id, row.status, row.changes)
            self._after_commit.ring(self._lock_set.job(row.id), row)

    def terminate(self, ids: Sequence[int], *, tree: bool, timers_before: int | None = None) -> None:
        """Make locked jobs terminating; terminated ones stay so."""
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
                    # Locking the subtree now could break the ascending order: it has transactions of its own.
                    self._terminate_below([job_id])
                self.terminate([job_id], tree=timer.ask == "terminate_tree", timers_before=timer.id)
            elif (
                timer.ask == "force"
                or status in ASKABLE
                or (timer.accepted and status == Status.FAILED and timer.ask == "run")
            ):
                self.ask([job_id], force=timer.ask == "force" or status == Status.FAILED, late_s=timer.late_s)

    def _apply_batch(self, kind: str, ids: list[int]) -> None:  # noqa: PLR0912 - an arm for each kind of step
        if not ids:
            return
        if kind == "timer":
            for place in ids:
                self._set_timer(self._timed[place])
        elif kind == "cancel":
            for place in ids:
                self._cancel(self._cancelled[place])
        elif kind == "note" or self._noting:
            is_run = kind in ("ask", "note")
            late = [job_id for job_id in ids if not (is_run and self._just_created(job_id))]
            asks.note(self._executor, late, "run" if is_run else kind)
            self._after_commit.noted += late
        elif kind == "terminate":
            for job_id in ids:  # a plain termination does not cancel a recursive one that was noted
                self.apply_due(job_id)
            self.terminate(ids, tree=False)
        elif kind == "terminate_tree":
            self._terminate_trees(ids)
        else:
            for job_id in ids if kind == "force" else ():  # else an earlier noted termination would win
                self.apply_due(job_id)
            late = [job_id for job_id in ids if kind == "force" or not self._just_created(job_id)]
            self.ask(late, force=kind == "force")

    def _may_ask(self, job_id: int, *, force: bool) -> bool:
        """Tell whether the job may be asked now. What is left of a termination reaches no child of a forced run."""
        status = self._lock_set.statuses[job_id]
        if not force or self._noting:
            return force or status in ASKABLE
        if status == Status.TERMINATED and is_being_deleted(self._executor, job_id):
            return False
        if status in ENDING or self._lock_set.job(job_id).parent_id is not None:
            tree_terminations.split(self._executor, [job_id])
        return True

    def _terminate_trees(self, ids: list[int]) -> None:
        large = [job_id for job_id in ids if job_id in self._lock_set.large]
        small = [job_id for job_id in ids if job_id not in self._lock_set.large]
        if large:
            # From now on the roots take no more children. If this process dies after the commit, the sweeper goes on.
            self.terminate(large, tree=True)
            self._terminate_below(large)
        if small:
            below = [row.id for row in trees.subtree(self._executor, small)]
            unlocked = {job_id for job_id in below if not self._lock_set.knows(job_id)}
            if unlocked:  # adopted in this very transaction, or since the tree was read
                self._after_commit.trees |= tree_terminations.begin(self._executor, unlocked, itself=True)
            self.terminate([job_id for job_id in below if job_id not in unlocked], tree=True)

    def _terminate_below(self, ids: Sequence[int]) -> None:
        self._after_commit.trees |= tree_terminations.begin(self._executor, ids, itself=False)

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
        """Remove a timer; a job queued for nothing else rests as before, but a terminated one is terminated again."""
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
        entry = dead.bury(
            self._executor, job_id, task_id=rested.task_id, reason=reason, error=text,
            traceback=error.get("traceback"), retries=rested.retries, wake_pending=False,
        )  # fmt: skip
        self._after_commit.events.append(JobBuried(job_id, self._lock_set.job(job_id).task, entry, reason))

    def _just_created(self, job_id: int) -> bool:
        """Whether the job is new and its first run, which no one can have claimed yet, is owed at once."""
        new = self._lock_set.new.get(job_id)
        if new is None or new.due_at is not None or new.wait_s:
            return False
        return self._lock_set.statuses[job_id] == Status.QUEUED

    def _moved(self, job_id: int, after: str, change: int) -> None:
        before = self._lock_set.statuses[job_id]
        self._lock_set.statuses[job_id] = after
        if before == Status.TERMINATED and after != before:
            ports.subscribe(self._executor, job_id)
        if before in ENDED and after == Status.QUEUED:
            told = Log(job_id, "revived", json.dumps({"from": before}), time.monotonic())
            finding.write_history(self._executor, [told], keep=self._history)
        self._after_commit.moved(self._lock_set.job(job_id), before, after, change)
