"""A consumer in the test's own process: what it was given, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu import Connection, Consumer, Queue

from tests.tools.waiting import wait_until


class Consuming:
    """Consumes queues on a channel of its own until it is closed."""

    def __init__(
        self, connection: Connection, *queues: str | Queue, prefetch: int = 0, no_ack: bool = False, **options: Any
    ) -> None:
        self.connection = connection
        self.channel = connection.channel()
        self.messages: list[Any] = []
        declared = [queue if isinstance(queue, Queue) else Queue(queue, routing_key=queue) for queue in queues]
        self._consumer = Consumer(self.channel, declared, on_message=self.messages.append, no_ack=no_ack, **options)
        if prefetch:
            self._consumer.qos(prefetch_count=prefetch)
        self._consumer.consume()

    @property
    def bodies(self) -> list[Any]:
        """What it was given so far."""
        return [message.payload for message in self.messages]

    def drain(self, timeout: float = 0.1) -> None:
        """Take what comes, until nothing has come for so long."""
        while self.drain_once(timeout):
            pass

    def drain_once(self, timeout: float = 0.1) -> bool:
        """Take the next there is, for so long at most; tells whether there was any."""
        try:
            self.connection.drain_events(timeout=timeout)
        except TimeoutError:
            return False
        return True

    def take(self, count: int, timeout: float = 10.0) -> list[Any]:
        """Return the bodies of the next `count` messages, without acknowledging them."""
        before = len(self.messages)

        def taken() -> bool:
            self.drain_once()
            return len(self.messages) >= before + count

        wait_until(taken, timeout=timeout, message=f"{count} messages")
        return self.bodies[before:]

    def cancel(self) -> None:
        """Consume no more; what was given is still held."""
        self._consumer.cancel()

    def close(self) -> None:
        """Leave, and give back what is held."""
        self.channel.close()

    def fall_silent(self) -> None:
        """Be as a killed process is: no heart beats, and nobody says goodbye."""
        self.channel.connection._heart._stop.set()


def publish(connection: Connection, queue: str, *bodies: Any, **options: Any) -> None:
    """Publish these to a queue, in this order."""
    with connection.Producer() as producer:
        for body in bodies:
            producer.publish(body, routing_key=queue, serializer="json", **options)


def waiting(server: Any, key: str) -> Sequence[bytes]:
    """The messages in a list, the next to be served first."""
    return list(reversed(server.lrange(key, 0, -1)))
