"""Reads the dead list of our own transports, and tells whose its entries are; kombu's transports have no such list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ...model.buried import Buried, Place
from ...model.durable import HEADER, Address, Key, key_of
from ...model.names import why_not_name
from ...transport.postgres import dead as postgres
from ...transport.redis import dead as redis

DeadMessage = redis.DeadMessage | postgres.DeadMessage


class DeadList(Protocol):
    """The dead list of a broker, whichever transport has it."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[DeadMessage]:
        """Yield all, those first that have been there for longer."""
        ...

    def page(self, place: Place) -> tuple[Place, Sequence[DeadMessage]]:
        """Return a page behind a place, and that place: the beginning, where something before it was taken out."""
        ...

    def delete(self, text: bytes) -> bool:
        """Remove an entry; False if somebody else has."""
        ...

    def deliver_again(self, dead: Any) -> bool:
        """Have a message delivered again; False if it is not there any more, ValueError for what is no message."""
        ...


def page(channel: Any, place: Place, *, doorbell: str) -> tuple[Place, Sequence[Buried]]:
    """Read a page behind a place, and return that place, which is the beginning if the list has become another."""
    place, found = list_of(channel).page(place)
    return place, [_buried(one, doorbell) for one in found]


def forget(channel: Any, texts: Sequence[bytes]) -> bool:
    """Remove entries; those that are left if this process dies in between are judged anew."""
    dead = list_of(channel)
    for text in texts:
        dead.delete(text)
    return True


def count(channel: Any) -> int:
    """Count the entries."""
    return len(list_of(channel))


def has_list(channel: Any) -> bool:
    """Tell whether a channel, or a class of channels, is of one of our transports (their `broker_channel.py`)."""
    return hasattr(channel, "DeadList")


def list_of(channel: Any) -> DeadList:
    """Return the dead list of a channel's broker; kombu's Redis transport may share the broker with ours."""
    found: DeadList = getattr(channel, "DeadList", redis.DeadList).of(channel)
    return found


def _buried(dead: DeadMessage, doorbell: str) -> Buried:
    key, store = _row_of(dead)
    return Buried(dead.text, key, store, is_doorbell=doorbell in dead.headers)


def _row_of(dead: DeadMessage) -> tuple[Key | None, str | None]:
    """Return which row an entry belongs to, and in which store; no row for what somebody else has put there."""
    header = dead.headers.get(HEADER)
    try:
        if dead.task_id is None or why_not_name(dead.task_id) is not None:
            return None, None
        return key_of(dead.task_id, header), Address.of(header).store
    except (ValueError, TypeError, KeyError, OverflowError):
        return None, None
