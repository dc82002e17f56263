"""Connecting to the broker in one bounded attempt: kombu's own ways try again for seconds, or without end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from kombu import Connection

from .. import configuration
from . import rabbitmq


def connection_to(app: Celery, seconds: float, url: str | None = None, *, confirm_publish: bool = False) -> Connection:
    """Return a connection for `establish` to the app's broker, or to that of its nodes which has this URL.

    `confirm_publish`: RabbitMQ is to confirm each message.
    """
    family, options = configuration.broker_family(app), dict(app.conf.broker_transport_options)
    if family == "redis":
        options.update(socket_timeout=seconds, socket_connect_timeout=seconds, retry_on_timeout=False)
    elif family == "amqp" and confirm_publish:
        options.update(confirm_publish=True)
    return app.connection_for_write(url, transport_options=options, connect_timeout=seconds)


def establish(connection: Connection, seconds: float) -> Any:
    """Connect, and return the transport's own connection, on which nothing waits for longer than `seconds`."""
    if connection.transport.driver_type == "postgres":
        connection.transport.link.answer_s = seconds
    established = connection.transport.establish_connection()
    if connection.transport.driver_type == "amqp":
        rabbitmq.bound(established, seconds)
    return established


@contextmanager
def established(connection: Connection, seconds: float) -> Iterator[Any]:
    """Connect for the block, as `establish` does."""
    made = establish(connection, seconds)
    try:
        yield made
    finally:
        connection.transport.close_connection(made)
