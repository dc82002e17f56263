"""The state of this transport in a broker, for the people who run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis import Redis

from .keys import Keys


@dataclass(frozen=True, slots=True)
class Overview:
    """The numbers."""

    consumers: int
    """Consumers, and those of them that are dead and not recovered yet."""
    held: int
    """Messages that they hold."""
    dead: int
    """Messages in the dead list."""


def overview(channel: Any) -> Overview:
    """Read the state from the broker of a channel."""
    client: Any = Redis(connection_pool=channel.pool)
    keys = Keys(channel.global_keyprefix, channel.sep)
    consumers = client.zrange(keys.consumers, 0, -1)
    with client.pipeline(transaction=False) as asked:
        for name in consumers:
            asked.hlen(keys.held(name.decode()))
        asked.llen(keys.dead)
        *held, dead = asked.execute()
    return Overview(len(consumers), sum(held), dead)
