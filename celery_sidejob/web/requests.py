"""What the operations of the HTTP API are given: from these types the OpenAPI document has its schemas."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

MOST = 200
"""The most items of a page, and of a bulk operation."""

Limit = Annotated[int, Meta(ge=1, le=MOST)]
JobId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Priority = Annotated[int, Meta(ge=0, le=9)]
Name = Annotated[str, Meta(min_length=1)]


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
