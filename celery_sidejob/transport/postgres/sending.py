"""Messages on their way into the tables: to one queue, to queues by their patterns, or to everybody who listens.

Events wait for the next beat of one of this process' hearts, which sends all of them in its statement. A worker tells
of itself every two seconds. If each event were a statement of its own, fifty idle workers would need as many for that
as for their beats. A process without a heart sends each event at once.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from kombu.exceptions import BatchPublishError

from ...model import native
from ...store.broker import messages, queues
from ...store.broker.queues import Broadcast
from ...store.statement import Transaction
from .. import topics
from . import rows
from .link import Link, ring_of_queue

TRANSIENT = 1
"""The delivery mode of a message that need not survive a restart."""
MOST = 10_000
"""How many events wait at most; further ones are sent at once."""


def put(link: Link, row: messages.Row) -> None:
    """Send a message to one queue."""
    link.run("put", lambda executor: messages.put(executor, row))
    # If we die here, consumers find the message at their next look.
    link.ring_apart(ring_of_queue(row.queue))


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


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Lent:
    """A transaction of a caller's, into which batches are written that are begun while it is in `LENT`."""

    transaction: Transaction
    queues: dict[str, None] = field(default_factory=dict)
    """Where messages were put, in order: to be rung for after its commit."""


LENT: ContextVar[Lent | None] = ContextVar("celery_sidejob_lent", default=None)


class PublishBatch:
    """A batch of one producer. After a flush has failed it takes nothing any more."""

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._rows: list[messages.Row] = []
        self._failed: BaseException | None = None
        self._closed = False
        self._lent = LENT.get()

    def publish(self, message: Any, **options: Any) -> Any:
        """Route one message; sends what has gathered if that is enough."""
        self._check_usable()
        result = self.channel.basic_publish(message, _publish_batch=self, **options)
        if len(self._rows) >= self._max_size:
            self.flush()
        return result

    def add(self, row: messages.Row) -> None:
        """Add a message for one queue."""
        self._rows.append(row)

    def flush(self) -> None:
        """Send all that has gathered."""
        self._check_usable()
        rows, self._rows = self._rows, []
        if not rows:
            return
        if self._lent is not None:
            for row in rows:
                messages.put(self._lent.transaction, row)
                self._lent.queues[row.queue] = None
            return
        link = self.channel.link
        try:
            link.run("copy", lambda executor: messages.put_all(executor, rows))
        except BaseException as error:
            self._failed = error
            if not isinstance(error, Exception):
                raise
            raise BatchPublishError(
                "a batch was not sent, or its answer was lost: it was sent as a whole then"
            ) from error
        for queue in dict.fromkeys(row.queue for row in rows):
            link.ring_apart(ring_of_queue(queue))

    def discard(self) -> None:
        """Forget what was not sent yet."""
        self._rows = []
        self._closed = True

    close = discard

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise BatchPublishError("this batch has failed before") from self._failed
        if self._closed:
            raise RuntimeError("this batch is closed")


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
