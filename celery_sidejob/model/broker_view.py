"""What a look into the broker tells of messages that the store has not heard of for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Sought:
    """A message that is looked for; `publication` says where it went, or if it is a job's, its queue and priority."""

    task_id: str
    publication: str | None = None
    queue: str = ""
    priority: int | None = None

    @classmethod
    def of_row(cls, row: Any) -> Sought:
        """Make it of a row that was published and that nobody holds."""
        return cls(row.task_id, row.publication)

    @classmethod
    def of_job(cls, row: Any) -> Sought:
        """Make it of a job's row that was published and that nobody holds."""
        return cls(row.task_id, queue=row.queue, priority=row.priority)


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen of the messages that were looked for; what is in none of these is not in the broker.

    A queue is served in order: what is in it behind the part that was read was published later than that part.
    """

    there: AbstractSet[str] = frozenset()
    behind: Mapping[str, str] = field(default_factory=dict)
    """Those whose queue goes on behind what was read of it: {task id: the queue}."""
    last: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The task ids that were read last of such a queue, the next to be served first."""
    unread: AbstractSet[str] = frozenset()
    """Those whose queue was not read this time: nothing is known of them."""


class Look(Protocol):
    """One look into the broker, in which each queue is read once, however many messages are looked for."""

    def find(self, sought: Sequence[Sought]) -> Sight | None:
        """Look for messages, at a bounded cost; None if the broker does not tell."""
        ...
