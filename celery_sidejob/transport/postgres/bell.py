"""Rings, by which a sender wakes consumers: NOTIFY in a commit of its own, after the message's.

A transaction that has sent a NOTIFY commits under a lock of the whole server. With the INSERT in it that lock is held
while the disk is flushed, so that all senders wait for each other; alone it is held for microseconds.

A process rings at most once in `APART_S` for a queue. The messages that it sends meanwhile need no ring of their own:
a consumer that was rung for looks again `transport.BACK_OFF_S[0]` later, which is longer.
"""

from __future__ import annotations

from time import monotonic

from .link import Link

APART_S = 0.005
MOST = 10_000
"""How many queues' rings are remembered."""

_rung: dict[tuple[str, str], float] = {}


def ring(link: Link, payload: str) -> None:
    """Ring, unless this process has just done so."""
    key, now = (link.channel, payload), monotonic()
    if now - _rung.get(key, 0.0) < APART_S:
        return
    if len(_rung) > MOST:
        _rung.clear()
    _rung[key] = now
    link.ring(payload)


def of_queue(queue: str) -> str:
    """Return what is rung when a message has come."""
    return f"q:{queue}"


def of_return(queue: str) -> str:
    """Return what is rung when messages have come back to their places, before those that were fetched since."""
    return f"b:{queue}"


def of_exchange(exchange: str) -> str:
    """Return what is rung for a broadcast to everybody who listens to a fanout exchange."""
    return f"x:{exchange}"


def is_of_broadcast(ring: str) -> bool:
    """Tell whether a ring is of an exchange, and not of a queue."""
    return ring.startswith("x:")


BINDINGS = "bound"
"""What is rung when an exchange whose transient messages may be routed by old bindings has another one."""

DEATH = "dead"
"""What is rung when a consumer was found dead: what it held is free, in any queue."""
