"""What the dead list of our own transport tells of rows and of jobs; kombu's transport has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model.buried import Buried, Place
from ...model.durable import HEADER, Address, Key, key_of
from ...model.names import why_not_name
from ...transport.dead import DeadList, DeadMessage


def page(channel: Any, place: Place, *, doorbell: str) -> tuple[Place, Sequence[Buried]]:
    """Read a page behind a place, and return that place, which is the beginning if the list has become another."""
    place, found = DeadList.of(channel).page(place)
    return place, [_buried(one, doorbell) for one in found]


def forget(channel: Any, texts: Sequence[bytes]) -> bool:
    """Remove entries; who dies in between leaves the others, which are judged anew."""
    dead = DeadList.of(channel)
    for text in texts:
        dead.delete(text)
    return True


def count(channel: Any) -> int:
    """Count the entries."""
    return len(DeadList.of(channel))


def has_list(channel: Any) -> bool:
    """Tell whether a channel, or a class of channels, is of our transport (transport/broker_channel.py)."""
    return hasattr(channel, "held")


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
