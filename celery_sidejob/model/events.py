"""Events for observers: an event is a value, told once, after the commit that made it true.

If the process dies between the two, the event is not told. Facts that must not be missed are rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .statistics import Measure


class Counted:
    """What is counted of the events of a class."""

    __slots__ = ()

    total: ClassVar[str | None]
    """The name of the total that counts these events, in `stats` and the metrics; None: they are not counted."""
    meaning: ClassVar[str]
    """The total's meaning in one sentence, for `stats` and the metrics."""
    counted_by: ClassVar[str | None] = None
    """The field whose value is the total's label."""


@dataclass(frozen=True, slots=True)
class JobEvent(Counted):
    """Something that happened to a job."""

    job_id: int
    task: str


@dataclass(frozen=True, slots=True)
class JobMoved(JobEvent):
    """A job moved from one status to another; `before` is None for a new job.

    Of two moves of a job the later one has the greater `change`, whichever process made it. If a run moved it, `run_no`
    is that run's, and `task_id` its asking's.
    """

    total = "status_changes"
    meaning = "Moves of jobs into a status."
    counted_by = "after"

    before: str | None
    after: str
    change: int
    run_no: int | None = None
    task_id: str | None = None


@dataclass(frozen=True, slots=True)
class JobBuried(JobEvent):
    """A job was entered in the dead set."""

    total = "jobs_buried"
    meaning = "Jobs put into the dead set."
    counted_by = "reason"

    entry_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobParked(JobEvent):
    """No worker of a job's queue knows its task: its run waits until one does."""

    total = "jobs_parked"
    meaning = "Jobs parked because no worker of their queue knew their task."

    queue: str


@dataclass(frozen=True, slots=True)
class RunEvent(JobEvent):
    """Something that happened to a run of a job."""

    run_no: int


@dataclass(frozen=True, slots=True)
class RunLost(RunEvent):
    """A run's worker died."""

    total = "runs_lost"
    meaning = "Runs lost with their workers."

    why: str
    loss: Mapping[str, Any]
    """The facts of its `Loss`."""


class RunRescued(RunEvent):
    """A lost run was rescued: its job is queued again."""

    total = "runs_rescued"
    meaning = "Lost runs that were queued again."


class RunReturned(RunEvent):
    """A run that a worker had claimed came back: the worker is gone, and whether the body was called is not known."""

    total = None


@dataclass(frozen=True, slots=True)
class RunFailed(RunEvent):
    """A run failed: it raised, its asking was ended from outside, or it was lost once too often."""

    total = None

    error: str
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class JobDeleted(JobEvent):
    """A job was deleted."""

    total = None

    tracked: bool = False


class LeaseLost(RunEvent):
    """A run was refused, because it is no longer its job's current run."""

    total = "leases_lost"
    meaning = "Runs that were refused because they were no longer their job's current run."


@dataclass(frozen=True, slots=True)
class TaskEvent(Counted):
    """Something that happened to an ordinary durable task."""

    task_id: str
    task: str


@dataclass(frozen=True, slots=True)
class TaskBuried(TaskEvent):
    """A durable task was entered in the dead set."""

    total = "tasks_buried"
    meaning = "Durable tasks put into the dead set."
    counted_by = "reason"

    entry_id: int | str
    reason: str


@dataclass(frozen=True, slots=True)
class TaskParked(TaskEvent):
    """No worker of a durable task's queue knows it: it waits until one does."""

    total = "tasks_parked"
    meaning = "Durable tasks parked because no worker of their queue knew them."

    queue: str


@dataclass(frozen=True, slots=True)
class TaskLost(TaskEvent):
    """The worker of a durable task died while it ran."""

    total = "tasks_lost"
    meaning = "Runs of durable tasks lost with their workers."

    why: str
    loss: Mapping[str, Any]
    """The facts of its `Loss`."""


class TaskRescued(TaskEvent):
    """A lost run of a durable task was rescued: the task runs again."""

    total = None


class TaskReturned(TaskEvent):
    """A durable task came back from a worker that is gone, which had fetched it: whether its body ran is not known."""

    total = None


class TaskEndedWell(TaskEvent):
    """A durable task that had been called lost has ended well."""

    total = "tasks_recovered"
    meaning = "Durable tasks that were declared lost and ended well after all."


@dataclass(frozen=True, slots=True)
class Swept:
    """The sweeper has finished a turn: its increase of each total."""

    totals: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run adds to the statistics of its task in its queue."""

    queue: str
    task: str
    measure: Measure
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A run of a durable task has finished it: what `sidejob_task_history` keeps."""

    task_id: str
    task: str
    queue: str
    how: str
    """Completed or failed."""
    lasted_s: float
    at: float = field(default_factory=time.monotonic)


Event = JobEvent | TaskEvent | Swept | Measured | TaskFinished

COUNTED: tuple[type[JobEvent | TaskEvent], ...] = (
    RunLost, RunRescued, LeaseLost, TaskLost, TaskEndedWell, JobBuried, TaskBuried, JobParked, TaskParked, JobMoved,
)  # fmt: skip
"""The events with a total, in the order in which people see them."""
