"""Keeps the client of a channel of kombu's Redis transport."""

from __future__ import annotations

import sys
from typing import Any

from .wrapping import wrap


def is_redis(channel: Any) -> bool:
    """Tell whether this is a channel of kombu's Redis transport or ours; with another broker neither is imported."""
    redis = sys.modules.get("kombu.transport.redis")
    return redis is not None and isinstance(channel, redis.Channel)


def keep_client(channel: Any) -> None:
    """Make the channel keep one client for each pool of connections that it opens; only with kombu's Redis transport.

    Replaces `Channel._create_client` of one channel of kombu's Redis transport; read in kombu 5.5.2 and 5.7.0.

    kombu makes a client for each command, which takes longer than sending the command (0.2 ms). A publication has one
    command; a delivery has two, for the note at its arrival and its removal at the acknowledgement. A client has no
    state but its pool, which kombu already shares between clients. Our own transport does the same in its channel. If a
    later kombu makes clients by another name, they are made for each command again.
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
            # read the address of a connection that is gone, and the AttributeError would end a worker that reconnects.
            from redis.exceptions import ConnectionError  # here: on other brokers nothing imports it

            raise ConnectionError("This connection to Redis was given up.")
        if kept is None or kept.connection_pool is not channel.pool:
            kept = before()
        return kept

    wrap(channel, "_create_client", create)
