"""Events for observers: an event is a value, reported once, after the commit that made it true.

If the process dies between the two, the event is not reported. Facts that must not be missed are rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from .status import RunEnd


class Counted:
    """How the events of a class are counted."""

    __slots__ = ()

    total: ClassVar[str | None] = None
    """The name of the total that counts these events, in `stats` and the metrics; None if they are not counted."""
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

    A later move of the same job has a greater `change`, in whatever process. If a run moved the job, `run_no` is the
    run's number, and `task_id` the task id of its asking.
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
    """No worker of a job's queue knows its task: its run waits until a worker does."""

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
    """A claimed run came back from a worker that is gone; whether the body was called is not known."""


@dataclass(frozen=True, slots=True)
class RunFailed(RunEvent):
    """A run failed: it raised, its asking was ended from outside, or it was lost once too often."""

    error: str
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class JobDeleted(JobEvent):
    """A job was deleted."""

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
    """No worker of a durable task's queue knows the task: it waits until a worker does."""

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


class TaskReturned(TaskEvent):
    """A fetched durable task came back from a worker that is gone; whether its body ran is not known."""


class TaskEndedWell(TaskEvent):
    """A durable task that had been declared lost has ended well."""

    total = "tasks_recovered"
    meaning = "Durable tasks that were declared lost and ended well after all."


@dataclass(frozen=True, slots=True)
class Swept:
    """The sweeper has finished a turn; contains the increase of each total."""

    totals: Mapping[str, int]


class Measure(StrEnum):
    """What is measured of runs."""

    WAIT = "wait"
    """From the moment a run was due to its beginning."""
    RUN = "run"
    """From its beginning to its end, however it ended; a run that was taken from its worker has none."""
    FAILURE = "failure"
    RETRY = "retry"
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run, or one of its steps, adds to the statistics of its task and queue."""

    queue: str
    task: str
    measure: Measure
    seconds: float | None = None
    step: str = ""
    """The name of the step; empty for the run."""


@dataclass(frozen=True, slots=True)
class StepEnded(RunEvent):
    """A run has done a step, or failed to: reported after the commit of its record, or as its error is raised.

    The end of a sleep is no event: the run passes it, and commits nothing.
    """

    name: str
    number: int
    """The number of this call among the calls of the same name, from 1."""
    kind: str
    seconds: float
    """The duration of the last try, or of the wait."""
    tries: int
    outcome: RunEnd
    """Completed, failed or retried."""


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A run of a durable task has finished it; recorded with `sidejob_task_history`."""

    task_id: str
    task: str
    queue: str
    how: str
    """Completed or failed."""
    lasted_s: float
    at: float = field(default_factory=time.monotonic)


Event = JobEvent | TaskEvent | Swept | Measured | TaskFinished

COUNTED: tuple[type[JobEvent | TaskEvent], ...] = (
    RunLost,
    RunRescued,
    LeaseLost,
    TaskLost,
    TaskEndedWell,
    JobBuried,
    TaskBuried,
    JobParked,
    TaskParked,
    JobMoved,
)
"""The events with a total, in the order in which people see them."""
