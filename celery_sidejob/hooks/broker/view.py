"""Questions about the broker. A broker that does not answer is left alone for a while, as after a failed publish."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from amqp.exceptions import AccessRefused
from celery import Celery

from ...model.errors import SettingsError
from ...model.logger import logger
from ...model.messages import Buried, Cursor
from ...store.connection.connections import Connections
from ..configuration import broker_identity
from ..messages import doorbell
from . import dead_list, rabbitmq
from .connection import BrokerConnection


class CeleryBroker:
    """Asks the broker of one app, over the connection that its publisher uses."""

    def __init__(self, app: Celery, connection: BrokerConnection, store: Connections) -> None:
        self._app = app
        self._connection = connection
        self._markers = Markers(store.schema)

    @property
    def identity(self) -> str:
        """The family and the virtual host, number or database of the broker; SettingsError if it cannot be told."""
        return broker_identity(self._app)

    @property
    def ready(self) -> bool:
        """Whether the pause after the last failure is over."""
        return self._connection.ready

    @property
    def knows_queues(self) -> bool:
        """Whether a queue can vanish by itself: on RabbitMQ."""
        return self._connection.family == "amqp"

    def ready_messages(self, queue: str) -> int | None:
        """Count the messages of a queue that no worker has fetched; GONE without the queue, None if unknown.

        In Redis a queue is a list for each step of priority, and one without messages is no key.
        """
        if self._connection.family == "redis":
            return self._connection.ask(lambda channel: int(channel.queue_declare(queue).message_count))
        if not self.knows_queues:
            return None
        found = self._connection.ask(lambda channel: rabbitmq.counts(channel.connection, queue))
        return None if found is None else found[0]

    def waiting(self, queue: str) -> tuple[int, int]:
        """Count the messages that wait in a RabbitMQ's queue, and its consumers; (0, 0) if that is not known now."""
        ready, consumers = self._connection.ask(lambda channel: rabbitmq.counts(channel.connection, queue)) or (0, 0)
        return max(0, ready), consumers

    def was_emptied(self, store: str | None = None) -> bool:
        """Look for a store's marker in the broker, and put it there; False if the broker does not answer.

        A fresh broker has no marker either. The caller counts messages before it publishes copies.
        """
        family = self._connection.family
        return self._connection.ask(lambda channel: self._markers.is_there(channel, family, store)) is False

    def dead_list(self) -> int | None:
        """Count what a transport of ours has given up; None with another one, or a broker that does not answer."""
        return self._connection.ask(dead_list.count) if self._has_dead_list else None

    def buried(self, cursor: Cursor) -> tuple[Cursor, Sequence[Buried]]:
        """Read a page of our transport's dead list, where the broker has that transport."""
        if not self._has_dead_list:
            return cursor, ()
        found = self._connection.ask(lambda channel: dead_list.page(channel, cursor, doorbell=doorbell.HEADER))
        return found or (cursor, ())

    def forget_buried(self, texts: Sequence[bytes]) -> bool:
        """Remove entries of that list; False if the broker does not answer."""
        return bool(self._connection.ask(lambda channel: dead_list.forget(channel, texts)))

    @cached_property
    def _has_dead_list(self) -> bool:
        try:
            if self._connection.family not in ("redis", "postgres"):
                return False
            return dead_list.has_list(self._app.connection_for_write().transport.Channel)
        except SettingsError:  # a URL that cannot be read, of which others tell
            return False


class Markers:
    """The markers of all stores with one schema: a key in Redis, an exchange in RabbitMQ, elsewhere nothing.

    A marker that is gone shows that the broker has lost what it had. Nobody uses the exchange. It is durable, so it is
    gone only if the virtual host was reset.
    """

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._forbidden: set[str] = set()

    def is_there(self, channel: Any, family: str, store: str | None) -> bool:
        """Tell whether a store's is, and put it there where it is not; True where there can be none."""
        marked = self._schema if store is None else f"{self._schema}:{store}"
        if family == "redis":
            return bool(channel.client.set(f"celery_sidejob:marker:{marked}", "1", get=True, keepttl=False))
        if family == "amqp" and marked not in self._forbidden:
            try:
                return rabbitmq.has_exchange(channel.connection, f"celery_sidejob.marker.{marked}")
            except AccessRefused as error:
                self._forbidden.add(marked)
                logger.warning("A reset of RabbitMQ's virtual host is noticed only after sidejob_lost_after: %s", error)
        return True
