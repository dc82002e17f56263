"""The sweeper's duties, in their order, and what they count."""

from __future__ import annotations

from .asks import Timers, UnusedRoom
from .batches import Batches
from .dead_list import DeadList
from .dead_workers import DeadWorkers, LostRuns
from .due import DueJobs, DueTasks
from .emptied_broker import EmptiedBroker, VanishedQueues
from .gates import CapacityPools, CapacitySamples, Gates, LimitKeys
from .parked_terminations import ParkedTerminations
from .prune import Prune
from .publications import Publications
from .schedules import Schedules
from .sweep import SweepDuty
from .trees import TreeDeletions, TreeTerminations
from .unsent_results import UnsentResults

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
    ParkedTerminations,
    TreeDeletions,
    LimitKeys,
    CapacitySamples,
    Prune,
)

COUNTS = {count.name: count for duty in DUTIES for count in duty.counts}
"""All counts that a sweep shows to people, by name."""

TOTALS = {count.total: count for count in COUNTS.values() if count.total is not None}
"""The counts that are added up for good, by the name of their total."""
