"""Reads the dead list of our own transports, and tells whose its entries are; kombu's transports have no such list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model.durable import HEADER, Address, Key, key_of
from ...model.messages import Buried, Cursor
from ...model.names import why_not_name
from ...transport.dead_list import DeadList, DeadMessage


def page(channel: Any, cursor: Cursor, *, doorbell: str) -> tuple[Cursor, Sequence[Buried]]:
    """Read a page behind a cursor, and return that cursor, which is the beginning if the list has become another."""
    cursor, found = list_of(channel).page(cursor)
    return cursor, [_buried(one, doorbell) for one in found]


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


def list_of(channel: Any) -> DeadList[Any]:
    """Return the dead list of a channel's broker; kombu's Redis transport may share the broker with ours."""
    if not has_list(channel):
        from ...transport.redis import dead  # here: on other brokers nothing imports redis-py

        return dead.DeadList.of(channel)
    found: DeadList[Any] = channel.DeadList.of(channel)
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
