"""The way back to kombu's own transport: all messages of our consumers go back to the lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis import Redis

from .keys import Keys
from .records import Records


@dataclass(frozen=True, slots=True)
class Released:
    """The numbers of messages that were given back, and that were not."""

    consumers: int
    messages: int
    alive: tuple[str, ...]
    """Live consumers, which keep their messages."""
    dead: int
    """Messages in the dead list, which stay there."""


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
