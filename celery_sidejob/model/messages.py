"""What goes to the broker and to the result backend, and the protocols by which they are reached.

Operations decide what must be sent and remember it in the store; `hooks` knows how Celery sends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FORMAT = 1
"""The version of what we put into rows and messages."""
_KEY = "continuation:"


@dataclass(frozen=True, slots=True)
class Doorbell:
    """ "Go and look at this job": run `for_run` of it is owed. Harmless when late, doubled or stale."""

    job_id: int
    for_run: int
    task_id: str
    task: str
    queue: str
    priority: int | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A whole publication that follows an asking's end: a callback, or the rest of a chain."""

    task_id: str
    queue: str
    publication: str

    @property
    def key(self) -> str:
        """The key of its row: the task id itself is wanted by the message of the job that this may become."""
        return _KEY + self.task_id

    @classmethod
    def of_row(cls, key: str, queue: str, publication: str) -> Continuation:
        """Make the continuation of a row."""
        return cls(key.removeprefix(_KEY), queue, publication)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an asking ended: its status, and its result or error as JSON text."""

    task_id: str
    job_id: int
    task: str
    queue: str
    outcome: str
    result: str
    options: Mapping[str, Any] | None = None
    args: str = "[]"
    kwargs: str = "{}"


class Publisher(Protocol):
    """Gives messages to the broker."""

    def publish(self, messages: Sequence[Doorbell | Continuation]) -> Sequence[Doorbell | Continuation]:
        """Publish as many as possible, in order, within a bounded time, and return those the broker has.

        Raises nothing for a broker that is down: what is not returned is published by the sweeper.
        """
        ...

    @property
    def ready(self) -> bool:
        """Whether this process would try the broker now; False during the pause after a failure."""
        ...

    def was_emptied(self) -> bool:
        """Tell whether the broker has lost what it had since this was last asked, where that can be known."""
        ...


class Results(Protocol):
    """Brings outcomes to the result backend and to what follows an asking."""

    def wanted(self, task: str, options: Mapping[str, Any] | None) -> bool:
        """Tell whether anything is to be sent when this asking ends."""
        ...

    def continuations(self, outcome: Outcome) -> Sequence[Continuation]:
        """Return the publications that follow, each with a task id of its own from now on. No network."""
        ...

    def store(self, outcome: Outcome) -> bool:
        """Store the result, count a chord's part, call errbacks; False if the backend could not be reached."""
        ...

    def show(self, outcome: Outcome) -> bool:
        """Only show how an asking stands, with no effect beyond that; False if nothing was stored. Never raises."""
        ...


class Observer(Protocol):
    """Is told what happened, after its commit."""

    def status_changed(self, job_id: int, task: str, before: str | None, after: str) -> None:
        """A job moved from one status to another."""
        ...

    def buried(self, entry_id: int, job_id: int, task: str, reason: str) -> None:
        """A job was entered in the dead set."""
        ...

    def lost(self, job_id: int, task: str, run_no: int) -> None:
        """A run's worker died."""
        ...

    def recovered(self, job_id: int, task: str, run_no: int) -> None:
        """A lost run was rescued: its job is queued again."""
        ...

    def published(self, channel: str, message: str) -> None:
        """A message was published on a channel: announce it live, not reliably."""
        ...
