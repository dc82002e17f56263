"""One Redis client for all that is said on a channel of kombu's.

kombu makes a new one for each command, which takes longer than to send it (0.2 ms): publishing has one, a delivery two,
for what is noted at its arrival and taken back at its acknowledgement.
"""

from __future__ import annotations

from typing import Any


def keep_client(channel: Any) -> None:
    """Have the channel make a client once for each pool of connections that it opens; does nothing to other brokers'.

    A client has no state but its pool, which kombu shares between them as it is.
    """
    make = getattr(channel, "_create_client", None)
    if make is None:
        return
    kept: Any = None

    def create(asynchronous: bool = False) -> Any:
        nonlocal kept
        if asynchronous:  # a channel has one of these, and keeps it
            return make(asynchronous=True)
        if kept is None or kept.connection_pool is not channel.pool:
            kept = make()
        return kept

    channel._create_client = create
