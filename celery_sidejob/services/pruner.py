"""Removes what has been finished for longer than the settings keep it, for a moment at a time.

A pass goes over the dead set, the notes on copies, the registry and all jobs. It is interrupted after each slice of
time, for a worker alone has to sweep as well, and goes on with the sweeper's next turn. If the process dies, its
successor begins a pass of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.status import Status
from ..operations.deletion import TOGETHER, LargeTree, TooLargeError, delete_finished
from ..operations.runtime import Runtime
from ..store import burials, dead, durable_messages, jobs, registry, twins
from ..store.statement import Executor

SLICE_S = 0.25
"""How long one turn of a worker's sweeper prunes."""
LONG_SLICE_S = 5.0
"""The same of a sweeper that is nobody's service: it makes one turn, and a pass of its own."""
PRUNE_S = 60.0
"""How long after a pass the next one begins."""
FRUITLESS_S = 5.0
"""How long after a slice that removed nothing the pass goes on."""
LATER_S = 3600.0
"""When a large tree is looked at again that could not be deleted."""
PAGE = 1000
ROOTS = 200
"""Jobs that are deleted together, each with all below it."""

DONE = frozenset({Status.COMPLETED, Status.TERMINATED})
"""What `sidejob_retention` removes. Failed jobs are in the dead set: a person decides, or `sidejob_dead_retention`."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed."""

    jobs: int = 0
    dead: int = 0
    parts: int = 0
    """Parts of jobs' trees that are too large to go at once."""

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(self.jobs + other.jobs, self.dead + other.dead, self.parts + other.parts)

    def __bool__(self) -> bool:
        return self != Pruned()


class Pruner:
    """Prunes one schema; only its sweeper calls this."""

    def __init__(self, runtime: Runtime, *, slice_s: float = SLICE_S) -> None:
        self._runtime = runtime
        self._slice_s = slice_s
        self._steps: Iterator[Pruned] | None = None
        self._next_at = float("-inf")
        self._stuck: dict[int, float] = {}

    def is_due(self) -> bool:
        """Tell whether it is time to prune."""
        return time.monotonic() >= self._next_at

    def run_once(self) -> Pruned:
        """Go on with the pass until the slice of time is over; returns what that removed."""
        deadline = time.monotonic() + self._slice_s
        removed = Pruned()
        steps, self._steps = self._steps or self._pass(), None  # a pass in which something fails is over
        self._next_at = time.monotonic() + PRUNE_S
        for step in steps:
            removed += step
            if time.monotonic() >= deadline:
                self._steps = steps
                self._next_at = time.monotonic() + (0 if removed else FRUITLESS_S)
                break
        return removed

    # ------------------------------------------------------------------------------------------------------------

    def _pass(self) -> Iterator[Pruned]:
        settings, connections = self._runtime.settings, self._runtime.connections
        if settings.dead_retention is not None:
            age_s = settings.dead_retention.total_seconds()
            yield from self._dead_jobs(age_s)
            yield from self._dead_tasks(age_s)
        if self._runtime.stores.several and twins.exist(connections):
            while twins.prune(connections) == twins.PAGE:
                yield Pruned()
        registry.forget_unserved(connections)
        yield Pruned()
        yield from self._jobs(settings.retention.total_seconds() if settings.retention is not None else None)

    def _dead_jobs(self, age_s: float) -> Iterator[Pruned]:
        """Remove entries together with their jobs: a failed job without an entry would be found by nobody."""
        after: int | None = 0
        while after is not None:
            found, after = dead.old_roots(self._runtime.connections, after=after, age_s=age_s, limit=PAGE)
            for removed in self._delete(found, DONE | {Status.FAILED}):
                yield Pruned(dead=removed.jobs, parts=removed.parts)
            yield Pruned()

    def _dead_tasks(self, age_s: float) -> Iterator[Pruned]:
        """Remove entries of ordinary tasks, which have nothing but that; a page of the dead set at a time."""
        connections = self._runtime.connections
        if not durable_messages.fits(connections):
            return
        after: int | None = 0
        while after is not None:

            def forget(executor: Executor, after: int = after) -> Any:
                return burials.forget_entries(executor, after=after, age_s=age_s, limit=PAGE)

            page = connections.transact("prune", forget, single=True)
            after = page.last if page.goes_on else None
            yield Pruned(dead=int(page.removed))

    def _jobs(self, age_s: float | None) -> Iterator[Pruned]:
        after: int | None = 0
        while after is not None:
            page = jobs.old_page(self._runtime.connections, after=after, age_s=age_s)
            after = page.last
            yield from self._delete(page.ids, DONE)
            yield Pruned()

    def _delete(self, roots: Sequence[int], statuses: frozenset[Status]) -> Iterator[Pruned]:
        """Delete jobs with all below them, some at a time."""
        for first in range(0, len(roots), ROOTS):
            yield from self._delete_together(roots[first : first + ROOTS], statuses)

    def _delete_together(self, roots: Sequence[int], statuses: frozenset[Status]) -> Iterator[Pruned]:
        try:
            yield Pruned(delete_finished(self._runtime, roots, statuses, most=TOGETHER))
        except TooLargeError:
            if len(roots) == 1:
                yield from self._delete_large(roots[0], statuses)
                return
            half = len(roots) // 2
            yield from self._delete_together(roots[:half], statuses)
            yield from self._delete_together(roots[half:], statuses)

    def _delete_large(self, root: int, statuses: frozenset[Status]) -> Iterator[Pruned]:
        self._stuck = {job_id: until for job_id, until in self._stuck.items() if until > time.monotonic()}
        if root in self._stuck:
            return
        tree = LargeTree(self._runtime, root, statuses)
        if tree.read():
            while tree.delete_part():
                yield Pruned(parts=1)
        is_gone = not jobs.find(self._runtime.connections, [root])
        if not is_gone:
            self._stuck[root] = time.monotonic() + LATER_S
        yield Pruned(int(is_gone))
