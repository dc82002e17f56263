"""Finds work in the store that is due, missing or lost, and starts it again.

One sweeper at a time per schema holds a leased row; several would only waste work. Its duties read a page of candidates
without locks, then act on one job per transaction. No row lock is held during a network call. A bad row is set aside,
and no step depends on the size of a queue.
"""

from __future__ import annotations

import time
from dataclasses import field, make_dataclass
from functools import partial
from typing import Any

from ...model.crash_points import reach
from ...model.events import Swept
from ...operations.runtime import Runtime
from ...store import workers
from ...store.errors import StoreDown
from ..duty import Duties, Report
from ..heartbeat.heartbeat import Heartbeat
from .asks import Publications, Timers, UnusedRoom
from .broker import DeadList, EmptiedBroker, VanishedQueues
from .dead_workers import DeadWorkers, LostRuns
from .due import DueJobs, DueTasks
from .ends import ParkedTerminations, TreeDeletions, TreeTerminations
from .gates import CapacityPools, CapacitySamples, Gates, LimitKeys
from .prune import Prune, RunSamples
from .results import ExpiredResults, LateBodies, UnsentResults
from .sweep import Sweep, SweepDuty
from .works import Batches, Schedules

DUTIES: tuple[type[SweepDuty], ...] = (
    DeadWorkers,
    LostRuns,
    Timers,
    UnusedRoom,
    Schedules,
    Batches,
    TreeTerminations,
    Publications,
    EmptiedBroker,
    VanishedQueues,
    CapacityPools,
    Gates,
    DueJobs,
    DeadList,  # before the tasks it dooms would count as missing and be published again
    DueTasks,
    UnsentResults,
    LateBodies,
    ParkedTerminations,
    TreeDeletions,
    LimitKeys,
    CapacitySamples,
    RunSamples,
    ExpiredResults,
    Prune,
)

COUNTS = {count.name: count for duty in DUTIES for count in duty.counts}
"""All counts that a sweep shows to people, by name."""

TOTALS = {count.total: count for count in COUNTS.values() if count.total is not None}
"""The counts with a permanent total, by the name of their total."""


TICK_S = 0.25
"""Seconds between two checks for dead workers; the other duties follow every `TURN_S`."""
WATCH_S = 0.1
"""Seconds between two checks of a worker that does not sweep: it may be due to try."""
LEASE_S = 2.0
"""Seconds for which a silent sweeper keeps the others from sweeping, unless its liveness lock is free."""
RENEW_S = 0.75

_Counted: Any = make_dataclass(
    "_Counted", [(count.name, count.kind, field(default=count.kind())) for count in COUNTS.values()]
)


class PollReport(_Counted):  # type: ignore[misc] # its attributes are what the duties count
    """The work that one sweep found and did; false if there was none (a suspicion does not count as work)."""

    def __bool__(self) -> bool:
        return any(getattr(self, count.name) for count in COUNTS.values() if count.is_work)

    def __iadd__(self, other: PollReport) -> PollReport:
        """Add the counts of another sweep."""
        for count in COUNTS.values():
            setattr(self, count.name, count.kind(getattr(self, count.name) + getattr(other, count.name)))
        return self


class Sweeper:
    """Sweeps one schema, by hand or, as the service of a worker, while no other worker does."""

    def __init__(self, runtime: Runtime, worker: Heartbeat | None = None) -> None:
        self.name = runtime.store.called("sweeper")
        self._runtime = runtime
        self._worker = worker
        self._sweep = Sweep(runtime, worker, self._may_sweep)
        self._duties = Duties(*(duty(self._sweep) for duty in DUTIES))
        self._sweeps = worker is None
        self._renewed_at = float("-inf")

    def run_once(self) -> PollReport | None:
        """Sweep once if this worker is the schema's sweeper; None if another worker is."""
        try:
            return self._do_all() if self._may_sweep() else None
        except StoreDown:
            self._sweep.trouble_at = time.monotonic()
            raise

    def wait_s(self) -> float:
        """Return the seconds to wait: fewer while a worker is suspected, more while another sweeps."""
        if not self._sweeps:
            return WATCH_S
        return 0.1 if self._sweep.suspects else TICK_S

    def close(self) -> None:
        """Do nothing: a sweeper keeps nothing between turns, and the worker gives up the lease when it leaves."""

    def _may_sweep(self) -> bool:
        """Acquire the lease, and renew it in time even in the middle of a long turn; False if another worker has it."""
        if self._worker is None:
            return True
        if not self._sweeps and not self._worker.sweep_is_due():
            return False
        if self._sweeps and time.monotonic() - self._renewed_at < RENEW_S:
            return True
        self._renewed_at = time.monotonic()
        schema = self._runtime.settings.schema
        hold = partial(workers.hold_sweeper_lease, worker_id=self._worker.worker_id, schema=schema, lease_s=LEASE_S)
        held = self._runtime.connections.transact("lease", hold, single=True)
        self._sweeps = held is not None
        self._sweep.has_schedules = held is not None and held.has_schedules
        self._sweep.has_batches = held is not None and held.has_batches
        return self._sweeps

    def _do_all(self) -> PollReport:
        report = Report()
        reach("sweep:before")
        self._sweep.backlog.begin_turn()
        try:
            self._duties.do(report)
        finally:  # the work before a failure counts
            found = PollReport(**{count.name: count.kind(report[count.name]) for count in COUNTS.values()})
            totals = {total: int(getattr(found, count.name)) for total, count in TOTALS.items()}
            self._runtime.observer.tell(Swept(totals))
        return found
