"""Broadcasts: a message that every queue gets that listens to an exchange just now; nobody acknowledges it.

Fanout exchanges carry remote control, and their senders ring for each message. Topic exchanges carry events to
transient queues. Nobody rings for them: the heart of who listens reads them with each of its beats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from kombu.log import get_logger

from ...store.broker.queues import broadcasts_since, last_broadcast
from .. import topics
from ..decoding import NotAMessageError, made
from . import rows
from .link import Link, is_of_broadcast, ring_of_exchange

logger = get_logger(__name__)

UNRUNG_S = 30.0
"""How often broadcasts are looked for that nobody has rung for."""
SETTLED_S = 2.0
"""After which time no broadcast with a smaller id appears any more: its sender was slow to commit."""


class Broadcasts:
    """The broadcasts that one connection delivers, by the `callbacks` of its queues."""

    def __init__(self, link: Callable[[], Link], callbacks: Mapping[str, Callable[[Any], Any]]) -> None:
        self._link = link
        self._callbacks = callbacks
        self._listening: dict[str, list[tuple[str, Any]]] = {}
        """Queues that get broadcasts: the exchange, and the pattern of the routing keys (None: all)."""
        self._since: int | None = None
        """Up to this id all broadcasts were delivered, or sent before we listened."""
        self._delivered_at: dict[int, float] = {}
        """When those behind it were delivered."""
        self._read_at = 0.0

    def listen(self, queue: str, exchange: str, pattern: Any) -> None:
        """Have a queue get the broadcasts of an exchange whose routing keys match."""
        listened = self._listening.setdefault(queue, [])
        if (exchange, pattern) not in listened:
            listened.append((exchange, pattern))

    def forget(self, queue: str, exchange: str | None = None) -> None:
        """Have it get no more of them, of this exchange or of any."""
        left = [one for one in self._listening.pop(queue, ()) if exchange is not None and one[0] != exchange]
        if left:
            self._listening[queue] = left

    def is_listening(self, queue: str) -> bool:
        """Tell whether a queue gets broadcasts, and so has no messages of its own."""
        return queue in self._listening

    def hears_fanout_only(self, queue: str) -> bool:
        """Tell whether a queue gets the messages of fanout exchanges only."""
        listened = self._listening.get(queue, ())
        return bool(listened) and all(pattern is None for _, pattern in listened)

    def rings(self, queues: Collection[str]) -> Sequence[str]:
        """Return the rings for what these queues get from fanout exchanges."""
        return [
            ring_of_exchange(exchange)
            for queue in queues
            for exchange, pattern in self._listening.get(queue, ())
            if pattern is None
        ]

    def of_events(self, queues: Collection[str]) -> tuple[int, Sequence[str]]:
        """Return the topic exchanges to which these queues listen, and the id behind which there may be news."""
        listened = [one for queue in queues for one in self._listening.get(queue, ())]
        return self._since or 0, sorted({exchange for exchange, pattern in listened if pattern is not None})

    def start(self, queues: Collection[str]) -> None:
        """Deliver what is sent from now on, if one of these queues listens."""
        if self._since is None and any(map(self.is_listening, queues)):
            self._since = self._link().run("read", last_broadcast)

    def deliver_due(
        self, rings: Collection[str], queues: Collection[str], heard: Sequence[Any], *, unrung: bool, hears: bool
    ) -> bool:
        """Deliver to these queues what a beat has `heard`, and what was rung for; tell whether there was any.

        With `unrung` it is time to look for what nobody has rung for: at once where no rings are heard.
        """
        if self._since is None:
            return False
        consumed = {queue: listened for queue, listened in self._listening.items() if queue in queues}
        is_time = unrung and (not hears or monotonic() >= self._read_at + UNRUNG_S)
        if is_time or any(map(is_of_broadcast, rings)):
            self._read_at = monotonic()
            heard = self._read(consumed)
        return self._deliver(heard, consumed)

    def _read(self, consumed: Mapping[str, Sequence[tuple[str, Any]]]) -> Sequence[Any]:
        exchanges = sorted({exchange for listened in consumed.values() for exchange, _ in listened})
        if not exchanges:
            return ()
        since = self._since or 0
        return self._link().run("read", lambda executor: broadcasts_since(executor, since, exchanges))

    def _deliver(self, found: Sequence[Any], consumed: Mapping[str, Sequence[tuple[str, Any]]]) -> bool:
        since, now = self._since or 0, monotonic()
        delivered = False
        for row in found:
            if row.id <= since or row.id in self._delivered_at:
                continue
            self._delivered_at[row.id] = now
            listening = [
                queue
                for queue, listened in consumed.items()
                if any(
                    one == row.exchange and (pattern is None or topics.matches(pattern, row.routing_key))
                    for one, pattern in listened
                )
            ]
            delivered |= self._hand_over(row, listening)
        settled = [one for one, at in self._delivered_at.items() if now - at > SETTLED_S]
        if settled:
            self._since = max(settled)
            self._delivered_at = {one: at for one, at in self._delivered_at.items() if one > self._since}
        return delivered

    def _hand_over(self, row: Any, queues: Sequence[str]) -> bool:
        """Deliver a broadcast to these queues, unless it is no message; tell whether anybody got it."""
        callbacks = [self._callbacks[queue] for queue in queues if queue in self._callbacks]
        try:
            for callback in callbacks:
                callback(made(partial(rows.payload_of, row, f"broadcast-{row.id}")))
        except NotAMessageError as error:
            logger.warning("A broadcast of %s is left out: %s", row.exchange, error.reason)
            return False
        return bool(callbacks)
