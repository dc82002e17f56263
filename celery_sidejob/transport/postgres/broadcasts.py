"""Broadcasts: a message that every queue gets that listens to an exchange just now; nobody acknowledges it.

Fanout exchanges carry remote control, and their senders ring for each message. Topic exchanges carry events to
transient queues. Nobody rings for them: the heart of who listens reads them with each of its beats.

Events wait for the next beat of one of this process' hearts, which sends all of them in its statement. A worker tells
of itself every two seconds. If each event were a statement of its own, fifty idle workers would need as many for that
as for their beats. A process without a heart sends each event at once.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from kombu.log import get_logger

from ...model import native
from ...store.broker import queues
from ...store.broker.queues import Broadcast, broadcasts_since, last_broadcast
from .. import topics
from ..decoding import NotAMessageError, made
from . import rows
from .link import Link, is_of_broadcast, ring_of_exchange

logger = get_logger(__name__)

UNRUNG_S = 30.0
"""How often broadcasts are looked for that nobody has rung for."""
SETTLED_S = 2.0
"""After which time no broadcast with a smaller id appears any more: its sender was slow to commit."""
TRANSIENT = 1
"""The delivery mode of a message that need not survive a restart."""
MOST = 10_000
"""How many events wait at most; further ones are sent at once."""


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


# -- sending them ------------------------------------------------------------------------------------------------------


def broadcast(link: Link, exchange: str, message: Any, routing_key: str) -> None:
    """Send a message to everybody who listens to an exchange; nobody is rung for."""
    _send(link, _broadcast(exchange, message, routing_key))


def _broadcast(exchange: str, message: Any, routing_key: str) -> Broadcast:
    headers, properties = rows.as_json(message["headers"]), rows.stored(message, message["properties"])
    return Broadcast(exchange, routing_key or "", headers, properties, message["body"])


def _send(link: Link, one: Broadcast) -> None:
    link.run("broadcast", lambda executor: queues.send_broadcast(executor, one))


class TopicExchange(topics.TopicExchange):
    """A topic exchange that reaches all its transient queues by one broadcast, however many they are.

    Whoever listens reads it with a beat, so nobody is rung for.
    """

    def deliver(self, message: Any, exchange: str, routing_key: str, **options: Any) -> None:
        """Replaces one message for each queue."""
        channel = self.channel
        is_transient = message["properties"].get("delivery_mode") == TRANSIENT
        bound = channel.connection.topology.bound_to(exchange, may_be_old=is_transient)
        found = [one for one in bound if topics.matches(one.routing_key, routing_key)]
        for queue in dict.fromkeys(one.queue for one in found if not one.transient):
            channel._put(queue, message, **options)
        if any(one.transient for one in found):
            event = _broadcast(exchange, message, routing_key)
            if not keep_event(channel.link, event):
                _send(channel.link, event)


# -- events, for the next beat -----------------------------------------------------------------------------------------

_Key = tuple[str, str, int]
_lock = native.lock()
_hearts: defaultdict[_Key, set[object]] = defaultdict(set)
"""The hearts that beat, by database, schema and process: a forked process has none."""
_waiting: dict[_Key, deque[Broadcast]] = {}


def begin_beats(link: Link, heart: object) -> None:
    """Note that a heart sends the events of this link's schema from now on."""
    with _lock:
        _hearts[_key(link)].add(heart)


def end_beats(link: Link, heart: object) -> None:
    """Note that the heart has ended, or is about to."""
    with _lock:
        _hearts[_key(link)].discard(heart)


def keep_event(link: Link, event: Broadcast) -> bool:
    """Have an event sent by the next beat; False if it must be sent at once."""
    key = _key(link)
    with _lock:
        if not _hearts[key]:
            return False
        waiting = _waiting.setdefault(key, deque())
        if len(waiting) >= MOST:
            return False
        waiting.append(event)
    return True


def take_events(link: Link) -> Sequence[Broadcast]:
    """Take what waits, to be sent now."""
    with _lock:
        return tuple(_waiting.pop(_key(link), ()))


def put_back_events(link: Link, events: Iterable[Broadcast]) -> None:
    """Have events that were taken, and not sent, wait before those that came since."""
    with _lock:
        _waiting.setdefault(_key(link), deque()).extendleft(reversed(tuple(events)))


def send_left(link: Link) -> None:
    """Send the events that no heart of this process will send any more."""
    left = deque(() if _hearts[_key(link)] else take_events(link))
    try:
        while left:
            _send(link, left[0])
            left.popleft()
    finally:
        put_back_events(link, left)


def _key(link: Link) -> _Key:
    return link.url, link.schema, os.getpid()
