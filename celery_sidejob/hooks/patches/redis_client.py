"""Keeps the client of a channel of kombu's Redis transport."""

from __future__ import annotations

import sys
from typing import Any

from .wrapping import wrap


def is_redis(channel: Any) -> bool:
    """Tell whether this is a channel of kombu's Redis transport or of ours; with another broker neither is imported."""
    redis = sys.modules.get("kombu.transport.redis")
    return redis is not None and isinstance(channel, redis.Channel)


def keep_client(channel: Any) -> None:
    """Have the channel make a client once for each pool of connections that it opens; leaves other brokers' alone.

    Replaces `Channel._create_client` of one channel of kombu's Redis transport; read in kombu 5.5.2 and 5.7.0.

    kombu makes a client for each command, which takes longer than to send it (0.2 ms): publishing has one, a delivery
    two, for what is noted at its arrival and taken back at its acknowledgement. A client has no state but its pool,
    which kombu shares between them as it is. Our own transport does the same in its channel. If a later kombu makes
    clients by another name, they are made for each command again.
    """
    if not hasattr(channel, "_create_client"):
        return
    kept: Any = None

    def create(before: Any, asynchronous: bool = False) -> Any:
        nonlocal kept
        if asynchronous:  # a channel has one of these, and keeps it
            return before(asynchronous=True)
        if getattr(channel.connection, "client", None) is None:
            # Closed a second time, after the first time failed half-way and the connection was given up. kombu would
            # ask what is gone for its address, and the AttributeError of that ends a worker that is to reconnect.
            from redis.exceptions import ConnectionError  # here: on other brokers nothing imports it

            raise ConnectionError("This connection to Redis was given up.")
        if kept is None or kept.connection_pool is not channel.pool:
            kept = before()
        return kept

    wrap(channel, "_create_client", create)
