"""Celery for work that must not be lost and may take months.

Each name is imported when it is first used: an app may use `celery_sidejob.transport` and nothing else of this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import transport  # noqa: F401  # makes the broker URLs sidejob:// and sidejobs:// known

if TYPE_CHECKING:
    from .announcements.subscription import Announcement, Subscription
    from .deadset import DeadEntry, DeadSet
    from .extension import SideJob
    from .hooks.errors import Overloaded, TaskRevokedError
    from .hooks.events import job_status_changed, step_ended, task_buried, task_lost, task_recovered
    from .hooks.jobs.sidejob_task import SideJobTask, sidejob_task
    from .hooks.logs import JSONFormatter, RunFilter
    from .hooks.tasks.durable_task import DurableTask
    from .jobs.batch import Batch, BatchCounts
    from .jobs.capacity import CapacityPool, SlotHolder
    from .jobs.job import Job
    from .jobs.port import Packet, Port
    from .jobs.queue import Queue, QueueCounts
    from .jobs.running import RunningJob, current_job, heartbeat, stopping
    from .jobs.schedule import Schedule
    from .jobs.steps import Step
    from .jobs.workers import WorkerInfo
    from .model.errors import (
        AliasTakenError,
        BatchClosedError,
        BatchNotFoundError,
        ChildFailedError,
        ChildNameTakenError,
        CommitInDoubtError,
        CycleError,
        DependencyFailedError,
        DuplicateError,
        HasDependentsError,
        HasParentError,
        IllegalMoveError,
        InvalidAliasError,
        InvalidChannelError,
        InvalidPortError,
        InvalidValueError,
        JobFailed,
        JobNotFoundError,
        LeaseLostError,
        MissingLibraryError,
        NotAChildError,
        PoolConflictError,
        PortFullError,
        PortNotFoundError,
        ResultTooLargeError,
        ScheduleNotFoundError,
        SchemaError,
        SettingsError,
        SideJobError,
        StepFailedError,
        StepNameError,
        StoreUnavailableError,
        UnitNotCommittedError,
        UnknownTaskError,
    )
    from .model.port import NO_DATA
    from .model.statistics import Durations, Statistics
    from .model.status import FINISHED, Progress, Status
    from .services.sweep.sweeper import PollReport
    from .unit.open_unit import Suspend
    from .unit.view import HistoryEntry, Timer

_MODULES = {
    ".announcements.subscription": ("Announcement", "Subscription"),
    ".deadset": ("DeadEntry", "DeadSet"),
    ".extension": ("SideJob",),
    ".hooks.tasks.durable_task": ("DurableTask",),
    ".hooks.logs": ("JSONFormatter", "RunFilter"),
    ".hooks.errors": ("Overloaded", "TaskRevokedError"),
    ".hooks.events": ("job_status_changed", "step_ended", "task_buried", "task_lost", "task_recovered"),
    ".hooks.jobs.sidejob_task": ("SideJobTask", "sidejob_task"),
    ".jobs.batch": ("Batch", "BatchCounts"),
    ".jobs.capacity": ("CapacityPool", "SlotHolder"),
    ".jobs.job": ("Job",),
    ".model.port": ("NO_DATA",),
    ".model.statistics": ("Durations", "Statistics"),
    ".model.status": ("FINISHED", "Progress", "Status"),
    ".jobs.port": ("Packet", "Port"),
    ".jobs.queue": ("Queue", "QueueCounts"),
    ".jobs.running": ("RunningJob", "current_job", "heartbeat", "stopping"),
    ".jobs.schedule": ("Schedule",),
    ".jobs.steps": ("Step",),
    ".jobs.workers": ("WorkerInfo",),
    ".services.sweep.sweeper": ("PollReport",),
    ".unit.open_unit": ("Suspend",),
    ".unit.view": ("HistoryEntry", "Timer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
"""The modules of the public names; those that are not among them are in `model.errors`."""

__all__ = [
    "FINISHED",
    "NO_DATA",
    "AliasTakenError",
    "Announcement",
    "Batch",
    "BatchClosedError",
    "BatchCounts",
    "BatchNotFoundError",
    "CapacityPool",
    "ChildFailedError",
    "ChildNameTakenError",
    "CommitInDoubtError",
    "CycleError",
    "DeadEntry",
    "DeadSet",
    "DependencyFailedError",
    "DuplicateError",
    "DurableTask",
    "Durations",
    "HasDependentsError",
    "HasParentError",
    "HistoryEntry",
    "IllegalMoveError",
    "InvalidAliasError",
    "InvalidChannelError",
    "InvalidPortError",
    "InvalidValueError",
    "JSONFormatter",
    "Job",
    "JobFailed",
    "JobNotFoundError",
    "LeaseLostError",
    "MissingLibraryError",
    "NotAChildError",
    "Overloaded",
    "Packet",
    "PollReport",
    "PoolConflictError",
    "Port",
    "PortFullError",
    "PortNotFoundError",
    "Progress",
    "Queue",
    "QueueCounts",
    "ResultTooLargeError",
    "RunFilter",
    "RunningJob",
    "Schedule",
    "ScheduleNotFoundError",
    "SchemaError",
    "SettingsError",
    "SideJob",
    "SideJobError",
    "SideJobTask",
    "SlotHolder",
    "Statistics",
    "Status",
    "Step",
    "StepFailedError",
    "StepNameError",
    "StoreUnavailableError",
    "Subscription",
    "Suspend",
    "TaskRevokedError",
    "Timer",
    "UnitNotCommittedError",
    "UnknownTaskError",
    "WorkerInfo",
    "current_job",
    "heartbeat",
    "job_status_changed",
    "sidejob_task",
    "step_ended",
    "stopping",
    "task_buried",
    "task_lost",
    "task_recovered",
]


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_MODULE_OF.get(name, ".model.errors"), __name__)
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
