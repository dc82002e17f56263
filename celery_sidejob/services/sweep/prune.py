"""Removes jobs and entries that were finished longer ago than the settings keep them, for a moment at a time.

A pass goes over the dead set, the notes on copies, the registry and all jobs. It pauses after each slice of time,
because a single worker must also sweep, and continues in the sweeper's next turn. If the process dies, its successor
begins a pass of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from ...model.status import Status
from ...operations.deletion import PRUNED_TOGETHER, LargeTree, delete_finished
from ...store import dead, duplicates, jobs, registry
from ...store.outbox import burials
from ..duty import Report
from .sweep import Sweep, SweepDuty

SLICE_S = 0.25
"""Seconds that a worker's sweeper prunes in one turn."""
LONG_SLICE_S = 5.0
"""The same for a sweep by hand, which makes one turn with a pass of its own."""
FRUITLESS_S = 5.0
"""Seconds after which the pass continues if a slice removed nothing."""
LATER_S = 3600.0
"""Seconds after which a large tree that could not be deleted is tried again."""
PAGE = 1000
ROOTS = 200
"""Jobs deleted together, each with all below it."""

DONE = frozenset({Status.COMPLETED, Status.TERMINATED})
"""Statuses that `sidejob_retention` removes. Failed jobs are in the dead set: `sidejob_dead_retention`, or a person."""


class Prune(SweepDuty):
    """Continues the pass until its slice of time is over.

    It reports `pruned_jobs`, `pruned_entries` of the dead set, and `pruned_parts` of trees too large to go at once.
    """

    interval_s = 60.0

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self.slice_s = LONG_SLICE_S if sweep.worker is None else SLICE_S
        self._steps: Iterator[Report] | None = None
        self._stuck: dict[int, float] = {}

    def _do(self, report: Report) -> None:
        deadline = time.monotonic() + self.slice_s
        steps, self._steps = self._steps or self._pass(), None  # a pass in which a step fails is over
        fruitless = True
        for removed in steps:
            report.update(removed)
            fruitless = fruitless and not removed.total()
            if time.monotonic() >= deadline:
                self._steps = steps
                self.due_at = time.monotonic() + (FRUITLESS_S if fruitless else 0)
                break

    # ------------------------------------------------------------------------------------------------------------

    def _pass(self) -> Iterator[Report]:
        settings = self._runtime.settings
        if settings.dead_retention is not None:
            age_s = settings.dead_retention.total_seconds()
            yield from self._dead_jobs(age_s)
            yield from self._dead_tasks(age_s)
        if self._runtime.stores.several:
            while duplicates.prune(self._connections) == duplicates.PAGE:
                yield Report()
        registry.forget_unserved(self._connections)
        yield Report()
        yield from self._jobs(settings.retention.total_seconds() if settings.retention is not None else None)

    def _dead_jobs(self, age_s: float) -> Iterator[Report]:
        """Remove entries together with their jobs: nobody would find a failed job that has no entry."""
        after: int | None = 0
        while after is not None:
            found, after = dead.old_roots(self._connections, after=after, age_s=age_s, limit=PAGE)
            for removed in self._delete(found, DONE | {Status.FAILED}):
                yield Report(pruned_entries=removed["pruned_jobs"], pruned_parts=removed["pruned_parts"])
            yield Report()

    def _dead_tasks(self, age_s: float) -> Iterator[Report]:
        """Remove entries of ordinary tasks, which have no other rows; a page of the dead set at a time."""
        after: int | None = 0
        while after is not None:
            forget = partial(burials.forget_entries, after=after, age_s=age_s, limit=PAGE)
            page = self._connections.transact("prune", forget, single=True)
            after = page.last if page.goes_on else None
            yield Report(pruned_entries=int(page.removed))

    def _jobs(self, age_s: float | None) -> Iterator[Report]:
        after: int | None = 0
        while after is not None:
            found, after = jobs.old_page(self._connections, after=after, age_s=age_s)
            yield from self._delete(found, DONE)
            yield Report()

    def _delete(self, roots: Sequence[int], statuses: frozenset[Status]) -> Iterator[Report]:
        """Delete jobs with all below them, some at a time."""
        for first in range(0, len(roots), ROOTS):
            yield from self._delete_together(roots[first : first + ROOTS], statuses)

    def _delete_together(self, roots: Sequence[int], statuses: frozenset[Status]) -> Iterator[Report]:
        gone = delete_finished(self._runtime, roots, statuses, most=PRUNED_TOGETHER)
        if gone is not None:
            yield Report(pruned_jobs=gone)
        elif len(roots) == 1:
            yield from self._delete_large(roots[0], statuses)
        else:
            half = len(roots) // 2
            yield from self._delete_together(roots[:half], statuses)
            yield from self._delete_together(roots[half:], statuses)

    def _delete_large(self, root: int, statuses: frozenset[Status]) -> Iterator[Report]:
        self._stuck = {job_id: until for job_id, until in self._stuck.items() if until > time.monotonic()}
        if root in self._stuck:
            return
        tree = LargeTree(self._runtime, root, statuses)
        if tree.read():
            while tree.delete_part():
                yield Report(pruned_parts=1)
        is_gone = not jobs.find(self._connections, [root])
        if not is_gone:
            self._stuck[root] = time.monotonic() + LATER_S
        yield Report(pruned_jobs=int(is_gone))
