"""Replaces `Channel._put` of the Redis channel that we publish on; read in kombu 5.5.2 and 5.7.0.

kombu's publishing ends in ``_put(queue, message, **options)``, which sends one LPUSH and waits for its answer. Ours
sends it and reads the answer later, or only makes the command (`hooks/broker/redis_client.py`). What it does not know,
such as `_publish_batch` or a queue that expires, goes to kombu's. A project's own channel with a `_put` of its own is
left alone. If a later kombu sends by another name, each message waits for its answer again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_redis(channel: Any) -> bool:
    """Tell whether this is a channel of kombu's Redis transport or of ours; with another broker neither is imported."""
    redis = sys.modules.get("kombu.transport.redis")
    return redis is not None and isinstance(channel, redis.Channel)


def can_be_replaced(channel: Any) -> bool:
    """Tell whether this is a Redis channel that puts messages as kombu's or our transport does."""
    if not is_redis(channel):
        return False
    return type(channel)._put is sys.modules["kombu.transport.redis"].Channel._put or hasattr(channel, "push_command")


def replace_put(channel: Any, by: Callable[..., None]) -> Callable[..., None]:
    """Have the channel put messages by `by`; returns its own way."""
    before: Callable[..., None] = channel._put
    channel._put = by
    return before
