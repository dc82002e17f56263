"""Messages on their way into the tables: to one queue, to queues by their patterns, or to everybody who listens."""

from __future__ import annotations

from collections import deque
from typing import Any

from ...store.broker import messages, queues
from .. import topics
from . import events, rows
from .link import Link, ring_of_queue

TRANSIENT = 1
"""The delivery mode of a message that need not survive a restart."""


def put(link: Link, row: messages.Row) -> None:
    """Send a message to one queue."""
    link.run("put", lambda executor: messages.put(executor, row))
    # If we die here, consumers find the message at their next look.
    link.ring_apart(ring_of_queue(row.queue))


def broadcast(link: Link, exchange: str, message: Any, routing_key: str) -> None:
    """Send a message to everybody who listens to an exchange; nobody is rung for."""
    _send(link, _broadcast(exchange, message, routing_key))


def _broadcast(exchange: str, message: Any, routing_key: str) -> queues.Broadcast:
    headers, properties = rows.as_json(message["headers"]), rows.stored(message, message["properties"])
    return queues.Broadcast(exchange, routing_key or "", headers, properties, message["body"])


def _send(link: Link, one: queues.Broadcast) -> None:
    link.run("broadcast", lambda executor: queues.send_broadcast(executor, one))


def send_left(link: Link) -> None:
    """Send the events that no heart of this process will send any more."""
    left = deque(events.left(link))
    try:
        while left:
            _send(link, left[0])
            left.popleft()
    finally:
        events.put_back(link, left)


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
            if not events.keep(channel.link, event):
                _send(channel.link, event)
