"""Queues and bindings: they are rows, and so the same for every process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from time import monotonic
from typing import Any

from ...store.broker import queues
from .bindings import Bindings
from .link import Link

UNUSED_S = 3600.0
"""How long a transient queue without an expiry of its own is kept when nobody uses it."""
USED_SHARE, USED_S = 3, 60.0
"""A queue is noted as used after this share of the time after which it would expire, and at least this often."""


class Topology:
    """Queues and bindings, as one connection declares and reads them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._bindings = Bindings()
        self._transient: dict[str, bool] = {}
        """The queues that were declared over this connection."""
        self._expires: dict[str, float | None] = {}
        """After how many unused seconds each of them goes."""
        self._used_at: dict[str, float] = {}

    def declare(self, queue: str, *, transient: bool, expires_ms: int | None) -> None:
        """Declare a queue; one that expires is removed after so long without use."""
        unused_s = expires_ms / 1000 if expires_ms is not None else UNUSED_S if transient else None
        # A message that is routed by a binding that a crash has undone would reach nobody.
        self._link.run_lastingly(
            "declare", lambda executor: queues.declare(executor, queue, transient=transient, unused_s=unused_s)
        )
        self._expires[queue] = unused_s
        self._transient[queue] = transient

    def is_declared(self, queue: str) -> bool:
        """Tell whether a queue is there."""
        return self._link.run("read", lambda executor: queues.is_declared(executor, queue))

    def is_transient(self, queue: str) -> bool:
        """Tell whether a queue of this connection need not survive its consumer."""
        return self._transient.get(queue, False)

    def delete(self, queue: str) -> None:
        """Remove a queue and its bindings; its messages stay."""
        self._link.run("delete", lambda executor: queues.delete(executor, queue))
        self._expires.pop(queue, None)

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Have a queue get the messages that an exchange has for a routing key."""
        self._link.run_lastingly("bind", lambda executor: queues.bind(executor, exchange, queue, routing_key))

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Remove a binding."""
        self._link.run("unbind", lambda executor: queues.unbind(executor, exchange, queue, routing_key))

    def bound_to(self, exchange: str, *, may_be_old: bool = False) -> Sequence[Any]:
        """Return the bindings of an exchange: routing_key, queue, transient."""
        return self._bindings.of(exchange, self._link, may_be_old=may_be_old)

    def expiring(self, names: Iterable[str]) -> Iterator[str]:
        """Yield those of these queues that would expire, and whose use was not noted lately; they count as noted."""
        now = monotonic()
        for name in names:
            unused_s = self._expires.get(name)
            if unused_s is not None and now - self._used_at.get(name, -inf) >= min(unused_s / USED_SHARE, USED_S):
                self._used_at[name] = now
                yield name
