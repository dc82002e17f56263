"""`broker_url = "sidejob://host:6379/0"`: Celery's Redis broker, with messages that a killed worker does not lose.

For any app of Celery or kombu, with or without the rest of this package: importing this module makes the URLs known
(`sidejobs://` uses TLS, `sidejob-sentinel://` asks sentinels for the server). It announces each message that is
refused, recovered or buried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.log import get_logger
from kombu.transport import TRANSPORT_ALIASES

logger = get_logger(__name__)

# kombu reads no entry points, allows no name with a `+`, and forgets a class given as `broker_transport` when it
# switches to the next of several URLs. The names are resolved when a URL is used, so redis-py is not imported here.
TRANSPORT_ALIASES["sidejob"] = "celery_sidejob.transport.redis.transport:Transport"
TRANSPORT_ALIASES["sidejobs"] = "celery_sidejob.transport.redis.transport:TLSTransport"
TRANSPORT_ALIASES["sidejob-sentinel"] = "celery_sidejob.transport.redis.transport:SentinelTransport"
TRANSPORT_ALIASES["sidejobpg"] = "celery_sidejob.transport.postgres.transport:Transport"

__all__ = ["message_buried", "message_refused", "messages_recovered"]

Receiver = Callable[..., Any]


class Announcement:
    """An event: its receivers are called in the thread of the event, and one that raises stops nothing.

    kombu has no signals, and a transport must not import Celery's: so these are minimal.
    """

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


def tell_refused(verb: str, consumer: str, delivery_tag: object) -> None:
    """Announce the end of a message that came too late."""
    logger.warning(
        "Cannot %s the message %s: consumer %s was declared dead or has lost its connection, and the message has gone "
        "to another one",
        verb,
        delivery_tag,
        consumer,
    )
    message_refused.send(verb=verb, consumer=consumer, delivery_tag=str(delivery_tag))


def tell_buried(queue: str, task_id: str | None, reason: str) -> None:
    """Announce a message that went to the dead list."""
    logger.error("A message of queue %r (task %s) is dead: %s", queue, task_id, reason)
    message_buried.send(queue=queue, task_id=task_id, reason=reason)
