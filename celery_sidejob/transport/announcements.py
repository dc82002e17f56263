"""The transport's announcements; a receiver that raises stops nothing.

kombu has no signals, and a transport must not import Celery's: so these are minimal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.log import get_logger

logger = get_logger(__name__)
Receiver = Callable[..., Any]


class Announcement:
    """An event: its receivers are called in the thread of the event."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._receivers: tuple[Receiver, ...] = ()

    def __repr__(self) -> str:
        return f"<Announcement {self.name}>"

    def connect(self, receiver: Receiver) -> Receiver:
        """Call this receiver with the facts as keywords; usable as a decorator. It must return quickly."""
        self._receivers += (receiver,)
        return receiver

    def disconnect(self, receiver: Receiver) -> None:
        """Stop calling this receiver."""
        self._receivers = tuple(one for one in self._receivers if one is not receiver)

    def send(self, **facts: Any) -> None:
        """Call all receivers, even if one raises."""
        for receiver in self._receivers:
            try:
                receiver(**facts)
            except Exception:
                logger.exception("A receiver of %s has raised", self.name)


message_refused = Announcement("message_refused")
"""`verb`, `consumer`, `delivery_tag`: this consumer counted as dead, or its connection broke, and its message has gone
to another. The message was executed twice, or will be; the verb ("ack", "reject", "requeue") had no effect."""

messages_recovered = Announcement("messages_recovered")
"""`consumer`, `queue`, `task_ids`: a dead consumer's messages are back at the head of their queue, oldest first."""

message_buried = Announcement("message_buried")
"""`queue`, `task_id`, `reason`: a message went to the dead list, because it cannot be delivered (`task_id` is None) or
was delivered too often."""
