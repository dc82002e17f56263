"""The result of a look into the broker for messages that have been silent for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

from .durable import Key


@dataclass(frozen=True, slots=True)
class Sought:
    """A message to look for; `publication` says where it went. For a job's message, its queue and priority do."""

    task_id: str
    publication: str | None = None
    queue: str = ""
    priority: int | None = None

    @classmethod
    def of_row(cls, row: Any) -> Sought:
        """Make it from a row that was published and that no run holds."""
        return cls(row.task_id, row.publication)

    @classmethod
    def of_job(cls, row: Any) -> Sought:
        """Make it from a job's row that was published and that no run holds."""
        return cls(row.task_id, queue=row.queue, priority=row.priority)


@dataclass(frozen=True, slots=True)
class Sight:
    """The messages that the look found or could not judge; a message in none of these sets is not in the broker.

    A queue is served in order: the messages behind the part that was read were published later than that part.
    """

    there: AbstractSet[str] = frozenset()
    behind: Mapping[str, str] = field(default_factory=dict)
    """Messages whose queue continues behind the part that was read: {task id: the queue}."""
    last: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For each such queue, the task ids that were read last, the next to be served first."""
    unread: AbstractSet[str] = frozenset()
    """Messages whose queue was not read this time: nothing is known about them."""


class Look(Protocol):
    """One look into the broker, which reads each queue once, however many messages it looks for."""

    def find(self, sought: Sequence[Sought]) -> Sight | None:
        """Look for messages, at a bounded cost; None if the broker cannot answer."""


@dataclass(frozen=True, slots=True)
class Buried:
    """A message in the transport's dead list."""

    text: bytes
    """The entry's text in the list, by which it is found again."""
    key: Key | None
    """The row of the message; None for a message without one."""
    store: str | None
    """The name of the store with that row, if there are several stores."""
    is_doorbell: bool
    """A doorbell: it only said that a job owes a run, and the store knows that without it."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a list was read that grows at its end: a number and the last entry, which reveal a removed entry."""

    number: int = 0
    last: bytes | None = None

    def past(self, texts: Sequence[bytes]) -> Cursor:
        """Return the cursor after further entries, which stay in the list."""
        return Cursor(self.number + len(texts), texts[-1]) if texts else self
