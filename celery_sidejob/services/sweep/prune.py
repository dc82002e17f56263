"""Removes jobs and entries that are older, or more numerous, than the settings allow, a slice of time at a time.

A pass goes over the dead set, the notes on copies, the registry and all jobs. It pauses after each slice of time,
because a single worker must also sweep, and continues in the sweeper's next turn. If the process dies, its successor
begins a new pass. Of the totals of runs it takes samples for charts, which it keeps
for a day.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from ...model.checks import MOST
from ...model.retention import Retention
from ...model.status import Status
from ...operations.changes.deletion import PRUNED_TOGETHER, Expired, LargeTree, delete_finished
from ...store import dead, deletions, duplicates, jobs, measured, registry
from ...store.errors import RowsLocked
from ...store.outbox import burials
from ..duty import Report
from .sweep import Sweep, SweepDuty

SLICE_S = 0.25
"""Seconds that a worker's sweeper prunes in one turn."""
LONG_SLICE_S = 5.0
"""The same for a sweep by hand, which makes a whole pass in one turn."""
FRUITLESS_S = 5.0
"""Seconds after which the pass continues if a slice removed nothing."""
LATER_S = 3600.0
"""Seconds after which a large tree that could not be deleted is tried again."""
PAGE = 1000
ROOTS = 200
"""How many jobs are deleted together, each with all jobs below it."""

DONE = frozenset({Status.COMPLETED, Status.TERMINATED})
"""Statuses that `sidejob_retention` removes. Failed jobs are in the dead set: `sidejob_dead_retention`, or a person."""


class Prune(SweepDuty):
    """Continues the pass until its slice of time is over.

    It reports `pruned_jobs`, `pruned_entries` of the dead set, and `pruned_parts` of trees too large for one deletion.
    """

    interval_s = 60.0

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self.slice_s = LONG_SLICE_S if sweep.worker is None else SLICE_S
        self._steps: Iterator[Report] | None = None
        self._stuck: dict[int, float] = {}
        self._expired: Expired | None = None
        self._counts = False
        """Whether the task of some job keeps a number of its jobs, as seen by the last pass."""

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
        self._expired = None
        if settings.dead_retention is not None:
            bounds = dead.Bounds.read(self._connections, settings.dead_retention)
            self._expired = partial(dead.expired, bounds=bounds)
            yield from self._dead_jobs(bounds)
            yield from self._dead_tasks(bounds)
        while duplicates.prune(self._connections) == duplicates.PAGE:
            yield Report()
        registry.forget_unserved(self._connections)
        yield Report()
        yield from self._statistics(settings.stats_history)
        yield from self._jobs(settings.retention or Retention())

    def _statistics(self, days: int) -> Iterator[Report]:
        """Forget the days whose statistics are no longer kept, one in each transaction."""
        forget = partial(measured.forget_day, days=days)
        while self._connections.transact("prune", forget, single=True):
            yield Report()

    def _dead_jobs(self, bounds: dead.Bounds) -> Iterator[Report]:
        """Remove entries together with their jobs: a failed job without an entry would not be found."""
        after: int | None = 0
        while after is not None:
            found, after = dead.old_jobs(self._connections, after=after, bounds=bounds, limit=PAGE)
            for removed in self._delete(found):
                yield Report(pruned_entries=removed["pruned_jobs"], pruned_parts=removed["pruned_parts"])
            yield Report()

    def _dead_tasks(self, bounds: dead.Bounds) -> Iterator[Report]:
        """Remove entries of durable tasks, which have no other rows; a page of the dead set at a time."""
        after: int | None = 0
        while after is not None:
            forget = partial(burials.forget_entries, after=after, bounds=bounds, limit=PAGE)
            page = self._connections.transact("prune", forget, single=True)
            after = page.last if page.goes_on else None
            yield Report(pruned_entries=int(page.removed))

    def _jobs(self, retention: Retention) -> Iterator[Report]:
        """Remove finished jobs. They are counted only if a setting or the task of a job bounds their number."""
        counts = retention.keep is not None or self._counts
        self._counts = False
        surplus: dict[str, int] = {}
        if counts:
            yield from self._count(retention.keep, surplus)
        after: int | None = 0
        while after is not None:
            page = deletions.old_page(self._connections, after=after, age_s=retention.age_s, surplus=surplus)
            after = page.last
            self._counts = self._counts or page.kept_by_number
            yield from self._delete(page.ids)
            yield Report()
        if self._counts and not counts:
            yield from self._jobs(retention)

    def _count(self, keep: int | None, surplus: dict[str, int]) -> Iterator[Report]:
        """Find, in each group, the newest job that may be removed: the first one beyond the number that is kept."""
        left: dict[str, int] = {} if keep is None else {"": keep}
        before: int | None = MOST
        while before is not None:
            kinds, before = deletions.newest_page(self._connections, before=before, all_others=keep is not None)
            for kind, (number, ids) in kinds.items():
                wanted = left.setdefault(kind, number or 0)
                if kind not in surplus and len(ids) > wanted:
                    surplus[kind] = ids[wanted]
                left[kind] = max(0, wanted - len(ids))
            yield Report()

    def _delete(self, roots: Sequence[int]) -> Iterator[Report]:
        """Delete jobs with all below them, some at a time."""
        for first in range(0, len(roots), ROOTS):
            yield from self._delete_together(roots[first : first + ROOTS])

    def _delete_together(self, roots: Sequence[int]) -> Iterator[Report]:
        """Delete jobs in one transaction, or in smaller ones if they are too many, or if rows are locked."""
        is_locked = False
        try:
            gone = delete_finished(self._runtime, roots, DONE, most=PRUNED_TOGETHER, expired=self._expired)
        except RowsLocked:
            gone, is_locked = None, True
            yield Report()
        if gone is not None:
            yield Report(pruned_jobs=gone)
        elif len(roots) == 1 and is_locked:
            pass  # the next pass tries again
        elif len(roots) == 1:
            yield from self._delete_large(roots[0])
        else:
            half = len(roots) // 2
            yield from self._delete_together(roots[:half])
            yield from self._delete_together(roots[half:])

    def _delete_large(self, root: int) -> Iterator[Report]:
        self._stuck = {job_id: until for job_id, until in self._stuck.items() if until > time.monotonic()}
        if root in self._stuck:
            return
        tree = LargeTree(self._runtime, root, DONE, self._expired)
        if tree.read():
            for _ in tree.parts():
                yield Report(pruned_parts=1)
        is_gone = not jobs.find(self._connections, [root])
        if not is_gone:
            self._stuck[root] = time.monotonic() + LATER_S
        yield Report(pruned_jobs=int(is_gone))


class RunSamples(SweepDuty):
    """Notes once a minute how many runs there were since the schema was made; runs themselves pay nothing for it."""

    interval_s = measured.SAMPLED_EVERY_S

    def _do(self, report: Report) -> None:
        report["runs_sampled"] += measured.take_sample(self._connections)
