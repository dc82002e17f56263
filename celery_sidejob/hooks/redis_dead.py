"""What the dead list of our own transport tells of rows and of jobs; kombu's transport has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..model.buried import Buried, Place
from ..model.durable import HEADER, Address, key_of
from ..transport.dead import DeadList, DeadMessage


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
    header = dead.headers.get(HEADER)
    try:
        key = key_of(dead.task_id, header) if dead.task_id is not None else None
    except (ValueError, TypeError, KeyError):  # somebody else's header
        key = None
    return Buried(dead.text, key, Address.of(header).store, is_doorbell=doorbell in dead.headers)
