"""The state of this transport in a broker, and the way back to kombu's own transport, for the people who run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis import Redis

from .keys import Keys
from .records import Records


@dataclass(frozen=True, slots=True)
class Overview:
    """The state, in numbers."""

    consumers: int
    """The number of consumers, and of those that are dead and not recovered yet."""
    held: int
    """The number of messages that they hold."""
    dead: int
    """The number of messages in the dead list."""


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


@dataclass(frozen=True, slots=True)
class Released:
    """The numbers of messages that were given back, and of those that were not."""

    consumers: int
    messages: int
    alive: tuple[str, ...]
    """The live consumers, which keep their messages."""
    dead: int
    """The number of messages in the dead list, which stay there."""


def release(channel: Any, *, force: bool = False) -> Released:
    """Give back the messages of dead consumers; with `force` also of live ones, whose acknowledgements then fail.

    The channel may be kombu's own: only the server, the database and the key prefix matter.
    """
    client: Any = Redis(connection_pool=channel.pool)
    keys = Keys(channel.global_keyprefix, channel.sep)
    records = Records(client, keys, delivery_limit=None)
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    consumers = messages = 0
    alive: list[str] = []
    for name, until_ms in client.zrange(keys.consumers, 0, -1, withscores=True):
        consumer = name.decode()
        if until_ms > now_ms and not force:
            alive.append(consumer)
            continue
        consumers += 1
        messages += records.leave(consumer)
    return Released(consumers, messages, tuple(alive), client.llen(keys.dead))
