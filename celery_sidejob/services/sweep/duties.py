"""The sweeper's duties, in order, and their counts."""

from __future__ import annotations

from .asks import Publications, Timers, UnusedRoom
from .broker import DeadList, EmptiedBroker, VanishedQueues
from .dead_workers import DeadWorkers, LostRuns
from .due import DueJobs, DueTasks
from .ends import ParkedTerminations, TreeDeletions, TreeTerminations
from .gates import CapacityPools, CapacitySamples, Gates, LimitKeys
from .prune import Prune
from .results import ExpiredResults, LateBodies, UnsentResults
from .run_samples import RunSamples
from .sweep import SweepDuty
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
