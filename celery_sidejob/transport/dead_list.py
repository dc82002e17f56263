"""A dead list of any transport: messages that are delivered to no worker until a person decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from kombu.log import get_logger
from kombu.utils.json import loads

from ..model.messages import Cursor

logger = get_logger(__name__)

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A message that was given up."""

    text: bytes = field(repr=False)
    """The key under which the list stores it: a whole entry of a list in Redis, or the id of a row."""
    id: str
    """The name of the entry for people: not every message has a task id."""
    queue: str
    task_id: str | None
    """The id of its task; None for a message without a task."""
    reason: str
    at: datetime
    message: str = field(repr=False)
    """The message as it was in its queue."""
    headers: Mapping[str, Any] = field(repr=False, compare=False)
    """The message's headers; none if they cannot be read."""
    list_key: str = ""
    """The list in Redis from which it came."""


def headers_in(text: str, *names: str) -> Mapping[str, Any]:
    """Return the headers in a text in JSON, below these names; none if they cannot be read here."""
    try:
        found = loads(text)
        for name in names:
            found = found[name]
    except Exception:  # of whatever decodes a type in them
        return {}
    return found if isinstance(found, Mapping) else {}


class DeadList(ABC):
    """The dead list of one broker."""

    @classmethod
    @abstractmethod
    def of(cls, channel: Any) -> DeadList:
        """Return the dead list of a channel's broker."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[DeadMessage]:
        """Yield all entries, the oldest first."""
        cursor = Cursor()
        while True:
            cursor, page = self.page(cursor)
            if not page:
                return
            yield from page
            cursor = cursor.past([one.text for one in page])

    @abstractmethod
    def page(self, cursor: Cursor) -> tuple[Cursor, list[DeadMessage]]:
        """Return the page behind a cursor, and the new cursor: the beginning, if an earlier entry was removed."""

    @abstractmethod
    def delete(self, text: bytes) -> bool:
        """Remove a message for good; False if it was already removed."""

    @abstractmethod
    def deliver_again(self, message: DeadMessage) -> bool:
        """Deliver a message again as a fresh one; False if it was retried or deleted meanwhile.

        Raises ValueError for an entry that is no message, and would be back at once.
        """


Dropped = tuple[str, str | None, datetime]
"""The queue of a dropped message, its task id, and the time when it was given up."""


def log_dropped(dropped: Iterable[Dropped], *, limit: int | None, days: float | None) -> None:
    """Log messages that a dead list with these bounds no longer keeps."""
    for queue, task_id, at in dropped:
        logger.error(
            "A message of queue %r (task %s) was dropped from the dead list, where it was since %s: the list "
            "keeps the newest %s messages, for %s days",
            queue,
            task_id,
            at,
            limit,
            days,
        )
