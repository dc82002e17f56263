"""A dead list, whichever transport has it: messages that nobody is given again until a person says otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from kombu.log import get_logger

from ..model.broker_view import Cursor

logger = get_logger(__name__)

DAY_S = 86_400


@dataclass(frozen=True)
class DeadMessage(ABC):
    """A message that was given up."""

    text: bytes = field(repr=False)
    """By which the list finds it again."""
    queue: str
    task_id: str | None
    """The id of its task; None for a message without a task."""
    reason: str
    at: datetime
    message: str = field(repr=False)
    """As it was in its queue."""

    @property
    @abstractmethod
    def id(self) -> str:
        """By what people name it: not every message has a task id."""

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, Any]:
        """The message's headers; none if they cannot be read."""


M = TypeVar("M", bound=DeadMessage)


class DeadList(ABC, Generic[M]):
    """The dead list of one broker."""

    @classmethod
    @abstractmethod
    def of(cls, channel: Any) -> DeadList[M]:
        """Return that of a channel's broker."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[M]:
        """Yield all, those first that have been there for longer."""
        cursor = Cursor()
        while True:
            cursor, page = self.page(cursor)
            if not page:
                return
            yield from page
            cursor = cursor.past([one.text for one in page])

    @abstractmethod
    def page(self, cursor: Cursor) -> tuple[Cursor, list[M]]:
        """Return a page behind a cursor, and that cursor: the beginning, if an entry before it was removed."""

    @abstractmethod
    def delete(self, text: bytes) -> bool:
        """Remove a message for good; False if somebody else has."""

    @abstractmethod
    def deliver_again(self, message: M) -> bool:
        """Have a message delivered again, as if it had never been; False if it was retried or deleted meanwhile.

        Raises ValueError for an entry that is no message, and would be back at once.
        """


Dropped = tuple[str, str | None, datetime]
"""The queue of a dropped message, its task's id, and when it was given up."""


def log_dropped(dropped: Iterable[Dropped], *, limit: int | None, days: float | None) -> None:
    """Log messages that a dead list with these bounds keeps no longer."""
    for queue, task_id, at in dropped:
        logger.error(
            "A message of queue %r (task %s) was dropped from the dead list, where it was since %s: the list "
            "keeps the newest %s messages, for %s days",
            queue, task_id, at, limit, days,
        )  # fmt: skip
