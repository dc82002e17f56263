"""What RabbitMQ needs beyond kombu: confirmed messages, queues declared again when they are gone, a watchdog."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from amqp.exceptions import MessageNacked, NotFound
from celery.worker import state
from kombu import Producer, Queue

from ...model.logger import logger
from ...model.messages import GONE
from ...store import registry
from ...store.connection.connections import Connections
from ..messages.carried import check_amqp, check_route


class UnroutableError(Exception):
    """RabbitMQ has no queue for a message, not even after it was declared again."""


class ConfirmedProducer(Producer):
    """Returns from `publish` when a queue has the message.

    Each confirmation has the number of its message.

    Without confirms a message is "sent" as soon as a socket has taken it, whatever has become of the broker. Without
    `mandatory` a message for a queue that was deleted is confirmed and dropped. What is for no queue in particular, a
    monitoring event for one, may well be for nobody.
    """

    def __init__(self, channel: Any) -> None:
        self._came_back: list[str] = []
        self._connection = channel.connection  # a channel that failed has none any more
        self._last_tag = 0
        self._outstanding: set[int] | None = None
        """The numbers of the messages of a batch that are not confirmed yet."""
        self._nacked = False
        super().__init__(channel, on_return=self._note_return)
        channel.events["basic_ack"].add(self._note_ack)
        channel.events["basic_nack"].add(self._note_nack)

    def publish(self, body: Any, **options: Any) -> Any:
        """Publish, and wait for the confirmation; raises the connection's errors, MessageNacked and UnroutableError.

        A process that dies here may have published the message. Its row is not marked, so it goes out once more.
        """
        options["mandatory"] = any(isinstance(entity, Queue) for entity in options.get("declare") or ())
        if self._outstanding is not None:
            return super().publish(body, **options)
        try:
            with self.batch():
                return super().publish(body, **options)
        except UnroutableError:  # kombu declares once for each connection, and what it declared is gone: once more
            with self.batch():
                return super().publish(body, **options)

    @contextmanager
    def batch(self, max_size: int = 0) -> Iterator[None]:
        """Have publishes in the block wait for no confirmation; at its end all must have come.

        Raises MessageNacked or UnroutableError if any of the messages, never mind which, is in no queue. Further
        publishes declare their queues anew then.
        """
        if not self.channel._confirm_selected:  # py-amqp forgets it when it opens a channel again that was closed
            self.channel._confirm_selected = True
            self.channel.confirm_select()
            self._last_tag = 0
        self._came_back.clear()
        self._nacked, self._outstanding = False, set()
        try:
            yield
            while self._outstanding:
                self._connection.drain_events()  # within the bounds of the connection
        finally:
            self._outstanding = None
        if self._nacked:
            raise MessageNacked("RabbitMQ did not take a message")
        if self._came_back:
            self._connection.client.declared_entities.clear()
            raise UnroutableError(f"no queue takes it: {self._came_back[0]}")

    def hang_up(self) -> None:
        """Close the connection without a word: the broker may be silent."""
        self._connection.collect()
        self._connection.client.collect()

    def _publish(self, *message: Any, **options: Any) -> Any:
        """Refuse what RabbitMQ would answer by closing the connection, before a byte of it is written."""
        _, priority, content_type, content_encoding, headers, properties, routing_key, _, _, exchange, *_ = message
        around = {"priority": priority, "content_type": content_type, "content_encoding": content_encoding}
        check_amqp(headers or {}, {**around, **(properties or {})}, frame_bytes=self._connection.frame_max)
        check_route(exchange, routing_key)
        published = super()._publish(*message, **options)
        self._last_tag += 1
        if self._outstanding is not None:
            self._outstanding.add(self._last_tag)
        return published

    def _note_ack(self, tag: int, multiple: bool) -> None:
        outstanding = self._outstanding or set()
        outstanding -= {one for one in outstanding if one <= tag} if multiple else {tag}

    def _note_nack(self, tag: int, multiple: bool) -> None:
        self._nacked = True
        self._note_ack(tag, multiple)

    def _note_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        self._came_back.append(f"{error}, exchange {exchange!r}, routing key {routing_key!r}")


def has_exchange(connection: Any, name: str) -> bool:
    """Tell whether an exchange is there, and make it where it is not; raises AccessRefused if that is forbidden."""
    try:
        with connection.channel() as channel:
            channel.exchange_declare(name, "fanout", passive=True)
        return True
    except NotFound:
        pass  # RabbitMQ has closed the channel
    with connection.channel() as channel:
        channel.exchange_declare(name, "fanout", durable=True, auto_delete=False)
    return False


def counts(connection: Any, queue: str) -> tuple[int, int]:
    """Count a queue's messages that are fetched by nobody, GONE if there is no such queue, and its consumers."""
    try:
        with connection.channel() as channel:
            found = channel.queue_declare(queue, passive=True)
    except NotFound:
        return GONE, 0
    return int(found.message_count), int(found.consumer_count)


LOOK_S = 5.0


class RabbitMQWatchdog:
    """Looks whether an idle worker should have been given something; a queue is suspected at one look and left at two.

    When a quorum queue is deleted and declared again at once, RabbitMQ (3.10 and others) forgets its consumers and
    tells them nothing: the worker stays connected, and is given nothing any more. Seen with a queue that was deleted
    under load.

    Nobody can be asked whether RabbitMQ knows one consumer. So it is deaf if it has nothing to do while messages wait,
    and RabbitMQ counts fewer consumers of their queue than there are workers of ours: one that stands by for another
    (`x-single-active-consumer`) is counted. Several that are deaf leave one after the other, or together.
    """

    name = "rabbitmq-watchdog"

    def __init__(self, worker: Any, waiting: Callable[[str], tuple[int, int]], connections: Connections) -> None:
        """`waiting` counts the messages that wait in a queue, and its consumers."""
        self._worker = worker
        self._count = waiting
        self._connections = connections
        self._taken = -1
        self._suspected: set[str] = set()

    def run_once(self) -> None:
        """Have the worker connect again if it is deaf."""
        taken, before = self._taken, self._suspected
        self._taken, self._suspected = state.all_total_count[0], set()
        consumer = getattr(self._worker.consumer, "task_consumer", None)
        if consumer is None or state.reserved_requests or self._taken != taken:
            return
        for queue in [queue.name for queue in list(consumer.queues)]:
            waiting, consumers = self._count(queue)
            if not waiting:
                continue
            if queue in before and consumers < registry.workers_of_queues(self._connections, ()).get(queue, 0):
                self._connect_again(queue)
                return
            self._suspected.add(queue)

    def wait_s(self) -> float:
        """Return how long to wait."""
        return LOOK_S

    def close(self) -> None:
        """Nothing is open."""

    def _connect_again(self, queue: str) -> None:
        logger.warning(
            "RabbitMQ does not know that this worker consumes from %r, as after its deletion: it connects again.", queue
        )
        with suppress(OSError, AttributeError):  # it is just connecting
            # The worker's own thread finds it closed, and does what it does whenever its broker hangs up.
            self._worker.consumer.connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)
