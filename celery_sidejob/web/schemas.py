"""What the operations of the HTTP API are given, and what they answer: the OpenAPI document has its schemas from here.

A value of an answer that `sidejob_redact` may replace has any type.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_type_hints

import msgspec
from msgspec import Meta, Struct

from ..deadset import DeadEntry
from ..inspection.jobs import Node
from ..jobs.steps import Step
from ..model.columns import SHOWN, JobColumns
from ..model.finding import Finding
from ..unit.view import HistoryEntry

MOST = 200
"""The most items of a page, and of a bulk operation."""

Limit = Annotated[int, Meta(ge=1, le=MOST)]
JobId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Priority = Annotated[int, Meta(ge=0, le=9)]
Name = Annotated[str, Meta(min_length=1)]
Time = Annotated[datetime, Meta(tz=True)]


class Strict(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What an operation is given; an unknown name is refused."""


class JobsQuery(Strict):
    """Filters of jobs, as those of `sidejob.jobs`."""

    status: str | None = None
    waiting_for: str | None = None
    task: str | None = None
    queue: str | None = None
    tag: str | None = None
    batch: str | None = None
    alias: str | None = None
    schedule: str | None = None
    unique: str | None = None
    parent: str | None = None
    created_by: str | None = None
    since: str | None = None
    older_than: str | None = None
    text: str | None = None
    order: Literal["newest", "oldest"] = "newest"
    cursor: JobId | None = None
    limit: Limit = 50


class NewJob(Strict):
    """A job to be made, as by `sidejob.enqueue`."""

    task: Name
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    queue: str | None = None
    parent: int | str | None = None
    child_name: str | None = None
    eta: datetime | None = None
    countdown: Seconds | None = None
    priority: Priority | None = None
    aliases: list[str] = []
    tags: list[str] = []
    state: dict[str, Any] | None = None
    inports: list[str] | None = None
    outports: list[str] | None = None
    unique: str | None = None
    on_duplicate: Literal["return", "refuse", "replace"] = "return"
    limit_key: str | None = None
    depends_on: list[int | str] = []
    on_failure: Literal["wait", "fail", "run"] = "wait"
    context: dict[str, Any] = {}


class Run(Strict):
    """How a job is asked to run."""

    force: bool = False
    fresh: bool = False
    parent: bool = False
    countdown: Seconds | None = None


class Terminate(Strict):
    """How a job is terminated."""

    recursive: bool = False


class Change(Strict):
    """What is changed of a job that waits or rests."""

    priority: Priority | None = None
    queue: str | None = None
    tag: list[str] = []
    untag: list[str] = []


class Fork(Strict):
    """Where a fork begins."""

    before: str | None = None


class Adopt(Strict):
    """A job that becomes a child."""

    job: int | str
    name: Name


class Disown(Strict):
    """The name of a child that is one no longer."""

    name: Name


class State(Strict):
    """Keys of a job's state to set and to remove."""

    set: dict[str, Any] = {}
    unset: list[str] = []


class Packets(Strict):
    """Values for a port: either one, or several in order."""

    value: Any = msgspec.UNSET
    values: list[Any] | None = None
    context: dict[str, Any] = {}


class Few(Strict):
    """How many."""

    limit: Limit = 50


class TasksQuery(Strict):
    """Filters of durable tasks."""

    status: Literal["queued", "scheduled", "gated", "running"] | None = None
    task: str | None = None
    queue: str | None = None
    text: str | None = None
    cursor: str = ""
    limit: Limit = 50


class Revoke(Strict):
    """Whether the processes of a running task are ended, too."""

    terminate: bool = False


class DeadFilters(Strict):
    """Filters of the dead set."""

    group: str | None = None
    task: str | None = None
    queue: str | None = None
    reason: str | None = None
    limit: Limit = 50


class DeadQuery(DeadFilters):
    """A page of the dead set."""

    cursor: str | None = None


class Reason(Strict):
    """Why something is paused."""

    reason: str | None = None


class Limits(Strict):
    """Limits of a queue: a number, null for none; one that is not given stays."""

    limit: int | msgspec.UnsetType | None = msgspec.UNSET
    limit_per_key: int | msgspec.UnsetType | None = msgspec.UNSET
    rate: str | msgspec.UnsetType | None = msgspec.UNSET
    ordered: bool | msgspec.UnsetType = msgspec.UNSET


class Slots(Strict):
    """The slots of a capacity pool."""

    limit: Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Message(Strict):
    """A message for a channel."""

    channel: Name
    message: Any
    context: dict[str, Any] = {}


class LogEntry(Strict):
    """An entry of the log."""

    entry: dict[str, Any] | str
    context: dict[str, Any] = {}


# -- answers -----------------------------------------------------------------------------------------------------------

_TYPES = get_type_hints(JobColumns)
if TYPE_CHECKING:

    class _Given(TypedDict):
        """The columns that are given when a job is made."""

else:
    _Given = TypedDict("_Given", {key: Any if column.is_json else _TYPES[column.name] for key, column in SHOWN.items()})


class JobInfo(_Given):
    """A job, as `Job.info`."""

    id: int
    status: str
    change: int
    created_at: Time
    ran_at: Time | None
    ended_at: Time | None
    task_id: str | None
    unique: Any
    tags: list[Any]
    tracked: bool
    in_run: bool
    asked_again: bool
    run_no: int
    losses: int
    retries: int
    error: dict[str, Any] | None


class JobDetails(JobInfo):
    """A job with all that belongs to it."""

    aliases: list[Any]
    history: list[HistoryEntry]
    state: Any
    inports: dict[str, dict[str, Any]]
    outports: dict[str, dict[str, Any]]
    children: dict[str, dict[str, Any]]
    children_count: int
    more_children: bool
    message: dict[str, Any] | None
    dependencies: list[int]
    dependents: list[int]
    progress: dict[str, Any] | None
    waiting_for: list[str]
    timers: list[dict[str, Any]]
    waiting_for_room: list[dict[str, Any]]
    queue_served: bool | None
    result: Any
    dead: dict[str, Any] | None


class JobLine(TypedDict):
    """A job in a list."""

    id: int
    status: str
    task: str
    queue: str
    parent: int | None
    created_at: Time
    ran_at: Time | None
    retries: int
    losses: int
    error: dict[str, Any] | None
    waiting_for: list[str]
    lasted_s: float | None


class Jobs(TypedDict):
    """A page of jobs."""

    items: list[JobLine]
    next: int | None


class Steps(TypedDict):
    """The steps of a job."""

    items: list[Step]


class Tree(TypedDict):
    """A job and the jobs below it."""

    items: list[Node]


class Deleted(TypedDict):
    """A job that is gone."""

    id: int
    deleted: bool


class SeenPacket(TypedDict):
    """A packet that waits on a port."""

    value: Any
    context: Any
    options: dict[str, Any]
    written_at: Time | None


class SeenPackets(TypedDict):
    """The next packets of a port."""

    items: list[SeenPacket]


class Written(TypedDict):
    """How many packets were written."""

    written: int


class Taken(TypedDict):
    """The values that were read."""

    values: list[Any]


class Logged(TypedDict):
    """That an entry of the log was made."""

    logged: bool


class Task(TypedDict):
    """A durable task that waits or runs."""

    task_id: str
    task: str
    status: str
    waits_for: str | None
    queue: str
    store: str | None
    unique: Any
    args: Any
    kwargs: Any
    due_at: Time | None
    declined_at: Time | None
    expires_at: Time | None
    published_at: Time | None
    running_since: Time | None
    runs_s: float | None
    worker: str | None
    retries: int
    losses: int
    last_loss: dict[str, Any] | None
    revoked: bool


class Tasks(TypedDict):
    """A page of durable tasks."""

    items: list[Task]
    next: str | None


class Revoked(TypedDict):
    """A durable task that was revoked: whether it runs, and whether the workers could be told."""

    task_id: str
    running: bool
    told: bool


class DeadEntries(TypedDict):
    """A page of the dead set."""

    items: list[DeadEntry]
    next: str | None


class Groups(TypedDict):
    """The newest entries by failure group, and whether there are more."""

    groups: dict[str, int]
    more: bool


class Retried(TypedDict):
    """How many entries are tried again."""

    retried: int


class RetriedOne(Retried):
    """What is tried again."""

    job: int | None
    task_id: str | None


class Removed(TypedDict):
    """Whether an entry was removed: not if a job below its job is not finished."""

    deleted: bool


class Gate(TypedDict):
    """The settings of a managed queue."""

    name: str
    paused_at: Time | None
    reason: str | None
    ordered: bool
    limit: int | None
    limit_per_key: int | None
    rate: str | None


class Named(TypedDict):
    """Something that has a name."""

    name: str


class Queue(Named, total=False):
    """A queue: its depth as in `stats`, and its settings if it is managed."""

    gate: Gate | None
    depth: int
    running: int
    delayed: int
    scheduled: int
    parked: int
    unpublished: int
    oldest_due_s: float | None
    oldest_unpublished_s: float | None
    workers: int
    managed: bool
    paused: bool
    limit: int | None


class Queues(TypedDict):
    """All queues."""

    items: list[Queue]


class Paused(Named):
    """Whether a queue is paused."""

    paused: bool


class Configured(Named, total=False):
    """What was changed of a queue."""

    limit: int | None
    limit_per_key: int | None
    rate: str | None
    ordered: bool


class Pools(TypedDict):
    """The capacity pools: limit, used slots, and what came, went and was refused."""

    items: list[dict[str, Any]]


class Resized(Named):
    """A capacity pool with its new limit."""

    limit: int


class Schedule(TypedDict):
    """A schedule, as `Schedule.info`."""

    name: str
    task: str
    args: Any
    kwargs: Any
    options: Any
    every: float | None
    cron: str | None
    timezone: str | None
    start: Time | None
    end: Time | None
    catch_up: str | int
    overlap: str
    jitter: float | None
    next_time: Time | None
    last_time: Time | None
    last_job: int | None
    last_task_id: str | None
    count: int
    paused_at: Time | None
    pause_reason: str | None
    declared: bool
    trouble: str | None


class PlannedSchedule(Schedule):
    """A schedule with its next times."""

    next_times: list[Time]


class Schedules(TypedDict):
    """All schedules."""

    items: list[PlannedSchedule]


class Made(TypedDict):
    """What a schedule has made: a job, or the message of a durable task."""

    job: int | None
    task_id: str | None


class WorkerRun(TypedDict):
    """A run in progress."""

    job: int | None
    task_id: str | None
    task: str
    began_at: Time
    lasts_s: float


class Worker(TypedDict):
    """A live worker, and what it runs."""

    name: str
    started_at: Time
    heard_at: Time
    queues: list[str]
    runs: list[WorkerRun]


class Workers(TypedDict):
    """The live workers."""

    items: list[Worker]


class Findings(TypedDict):
    """What `doctor` finds."""

    items: list[Finding]


class Version(TypedDict):
    """The version of this package, and the name of the app."""

    version: str
    app: str


Document = Mapping[str, Any]
"""A document whose form is described elsewhere."""
