"""The dead list: messages that nobody is to be given again, until a person says otherwise."""

from __future__ import annotations

from typing import Any

from ...model.messages import Cursor
from ...store.broker import dead
from .. import dead_list, tell_buried
from ..dead_list import DAY_S, DeadMessage, headers_in, log_dropped
from .link import Link, Run, ring_of_queue


class DeadList(dead_list.DeadList):
    """The dead list of one broker."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @classmethod
    def of(cls, channel: Any) -> DeadList:
        """Return that of a channel's broker."""
        return cls(channel.link)

    def __len__(self) -> int:
        return self._link.run("read", dead.count)

    def page(self, cursor: Cursor) -> tuple[Cursor, list[DeadMessage]]:
        """Return a page behind a cursor, and that cursor: the beginning, where there is another number before it."""
        after = int(cursor.last or 0)
        if (
            cursor.number
            and self._link.run("read", lambda executor: dead.count(executor, until=after)) != cursor.number
        ):
            return self.page(Cursor())
        return cursor, [_message(row) for row in self._link.run("read", lambda executor: dead.page(executor, after))]

    def delete(self, text: bytes) -> bool:
        """Remove a message for good; False if somebody else has."""
        return bool(self._link.run("delete", lambda executor: dead.delete(executor, [int(text)])))

    def deliver_again(self, message: DeadMessage) -> bool:
        """Have a message delivered again, as if it had never been; False if it was retried or deleted meanwhile."""
        queue = self._link.run("send again", lambda executor: dead.send_again(executor, int(message.text)))
        if queue is not None:
            self._link.ring_apart(ring_of_queue(queue))
        return queue is not None


def bury(run: Run, message_id: int, *, holder: int, reason: str) -> bool:
    """Put a message into the dead list, and announce it; False if that consumer does not hold it."""
    buried = run("bury", lambda executor: dead.bury(executor, holder=holder, ids=[message_id], reason=reason))
    for one in buried:
        tell_buried(one.queue, task_id_of(one.headers), reason)
    return bool(buried)


def bound(run: Run, *, limit: int | None, days: float | None) -> None:
    """Drop the oldest messages beyond so many, and those older than so many days; each is logged.

    If we die in between, some are dropped that are not logged.
    """
    kept_s = None if days is None else days * DAY_S
    while gone := run("bound", lambda executor: dead.bound(executor, most=limit, kept_s=kept_s)):
        log_dropped(((row.queue, task_id_of(row.headers), row.died_at) for row in gone), limit=limit, days=days)


def task_id_of(text: str) -> str | None:
    """Return the id of a message's task from the column of its headers; None if it has none that is a text."""
    found = headers_in(text).get("id")
    return found if isinstance(found, str) else None


def _message(row: Any) -> DeadMessage:
    text, task_id, headers = str(row.id), task_id_of(row.headers), headers_in(row.headers)
    return DeadMessage(text.encode(), text, row.queue, task_id, row.reason, row.died_at, row.body, headers)
