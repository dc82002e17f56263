"""Removes what has been finished for longer than the settings keep it, a bounded page at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..model.status import Status
from ..operations.deletion import delete_finished
from ..operations.runtime import Runtime
from ..store import burials, dead, durable_messages, jobs, twins
from ..store.statement import Executor

PRUNE_S = 60.0
WINDOW = 5000
"""How many ids one turn looks at; the next turn goes on behind them, and begins anew at the end."""
PAGE = 1000

DONE = frozenset({Status.COMPLETED, Status.TERMINATED})
"""What `sidejob_retention` removes. Failed jobs are in the dead set: a person decides, or `sidejob_dead_retention`."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What one turn removed."""

    jobs: int = 0
    dead: int = 0


class Pruner:
    """Prunes one schema; only its sweeper calls this."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._after = 0
        self._roots_after = 0
        self._entries_after = 0

    def run_once(self) -> Pruned:
        """Remove old entries of the dead set, old finished jobs with all below them, and notes on old copies."""
        settings = self._runtime.settings
        entries = 0
        if settings.dead_retention is not None:
            entries = self._prune_dead(settings.dead_retention.total_seconds())
        if self._runtime.stores.several and twins.exist(self._runtime.connections):
            twins.prune(self._runtime.connections, WINDOW)
        age_s = settings.retention.total_seconds() if settings.retention is not None else None
        return Pruned(self._prune_jobs(age_s), entries)

    def _prune_dead(self, age_s: float) -> int:
        """Remove entries together with their jobs: a failed job without an entry would be found by nobody."""
        old = dead.old_roots(self._runtime.connections, after=self._roots_after, age_s=age_s, limit=PAGE)
        removed = sum(delete_finished(self._runtime, row.job_id, DONE | {Status.FAILED}) for row in old)
        self._roots_after = old[-1].id if len(old) == PAGE else 0  # some stay, and must keep no others
        return removed + self._prune_dead_tasks(age_s)

    def _prune_dead_tasks(self, age_s: float) -> int:
        """Remove entries of ordinary tasks, which have nothing but that; a page of the dead set at a time."""
        connections = self._runtime.connections
        if not durable_messages.fits(connections):
            return 0

        def forget(executor: Executor) -> Any:
            return burials.forget_entries(executor, after=self._entries_after, age_s=age_s, limit=PAGE)

        page = connections.transact("prune", forget, single=True)
        self._entries_after = page.last or 0
        return int(page.removed)

    def _prune_jobs(self, age_s: float | None) -> int:
        connections = self._runtime.connections
        found = jobs.old_roots(connections, after=self._after, window=WINDOW, age_s=age_s)
        removed = sum(delete_finished(self._runtime, row.id, DONE) for row in found)
        self._after += WINDOW
        if self._after > jobs.last_id(connections):
            self._after = 0
        return removed
