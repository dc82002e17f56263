"""Questions about the broker. A broker that does not answer is left alone for a while, as after a failed publish."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from amqp.exceptions import AccessRefused
from celery import Celery

from ...model.durable import HEADER, Address, Key, key_of
from ...model.errors import SettingsError
from ...model.logger import logger
from ...model.messages import Buried, Cursor
from ...model.names import why_not_name
from ...store.connection.connections import Connections
from ...transport.dead_list import DeadList, DeadMessage
from ..configuration import broker_identity
from ..messages import doorbell
from . import rabbitmq
from .connection import BrokerConnection


class CeleryBroker:
    """Asks the broker of one app, over the connection that its publisher uses."""

    def __init__(self, app: Celery, connection: BrokerConnection, store: Connections) -> None:
        self._app = app
        self._connection = connection
        self._schema = store.schema
        self._forbidden: set[str] = set()
        """The markers that RabbitMQ does not let us put there."""

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

        The marker is a key in Redis, an exchange in RabbitMQ, elsewhere nothing; one that is gone shows that the broker
        has lost what it had. Nobody uses the exchange. It is durable, so it is gone only if the virtual host was reset.
        A fresh broker has no marker either. The caller counts messages before it publishes copies.
        """
        marked, family = self._schema if store is None else f"{self._schema}:{store}", self._connection.family
        return self._connection.ask(lambda channel: self._is_marked(channel, family, marked)) is False

    def _is_marked(self, channel: Any, family: str, marked: str) -> bool:
        """Tell whether a marker is there, and put it there where it is not; True where there can be none."""
        if family == "redis":
            return bool(channel.client.set(f"celery_sidejob:marker:{marked}", "1", get=True, keepttl=False))
        if family == "amqp" and marked not in self._forbidden:
            try:
                return rabbitmq.has_exchange(channel.connection, f"celery_sidejob.marker.{marked}")
            except AccessRefused as error:
                self._forbidden.add(marked)
                logger.warning("A reset of RabbitMQ's virtual host is noticed only after sidejob_lost_after: %s", error)
        return True

    def dead_list(self) -> int | None:
        """Count what a transport of ours has given up; None with another one, or a broker that does not answer."""
        return self._connection.ask(lambda channel: len(dead_list_of(channel))) if self._has_dead_list else None

    def buried(self, cursor: Cursor) -> tuple[Cursor, Sequence[Buried]]:
        """Read a page of our transport's dead list, where the broker has that transport."""
        if not self._has_dead_list:
            return cursor, ()
        found = self._connection.ask(lambda channel: _page(channel, cursor))
        return found or (cursor, ())

    def forget_buried(self, texts: Sequence[bytes]) -> bool:
        """Remove entries of that list; False if the broker does not answer."""
        return bool(self._connection.ask(lambda channel: _forget(channel, texts)))

    @cached_property
    def _has_dead_list(self) -> bool:
        try:
            if self._connection.family not in ("redis", "postgres"):
                return False
            return has_dead_list(self._app.connection_for_write().transport.Channel)
        except SettingsError:  # a URL that cannot be read, of which others tell
            return False


def has_dead_list(channel: Any) -> bool:
    """Tell whether a channel, or a class of channels, is of one of our transports (their `broker_channel.py`)."""
    return hasattr(channel, "DeadList")


def dead_list_of(channel: Any) -> DeadList:
    """Return the dead list of a channel's broker; kombu's Redis transport may share the broker with ours."""
    if not has_dead_list(channel):
        from ...transport.redis import dead  # here: on other brokers nothing imports redis-py

        return dead.DeadList.of(channel)
    found: DeadList = channel.DeadList.of(channel)
    return found


def _page(channel: Any, cursor: Cursor) -> tuple[Cursor, Sequence[Buried]]:
    """Read a page behind a cursor, and return that cursor, which is the beginning if the list has become another."""
    cursor, found = dead_list_of(channel).page(cursor)
    return cursor, [Buried(dead.text, *_row_of(dead), is_doorbell=doorbell.HEADER in dead.headers) for dead in found]


def _forget(channel: Any, texts: Sequence[bytes]) -> bool:
    """Remove entries; those that are left if this process dies in between are judged anew."""
    dead = dead_list_of(channel)
    for text in texts:
        dead.delete(text)
    return True


def _row_of(dead: DeadMessage) -> tuple[Key | None, str | None]:
    """Return which row an entry belongs to, and in which store; no row for what somebody else has put there."""
    header = dead.headers.get(HEADER)
    try:
        if dead.task_id is None or why_not_name(dead.task_id) is not None:
            return None, None
        return key_of(dead.task_id, header), Address.of(header).store
    except (ValueError, TypeError, KeyError, OverflowError):
        return None, None
