"""A client of Redis for announcements, with the connections that kombu would make: sentinels, TLS and passwords too."""

from __future__ import annotations

from contextlib import suppress

from celery import Celery
from kombu import Connection

from ...announcements.over_redis import Client
from ...model.errors import SettingsError
from .attempt import connection_to, establish


def client_of(app: Celery, url: str | None, seconds: float) -> Client:
    """Return a client of the app's broker, or of the Redis with this URL; no answer is waited for longer than this."""
    from redis import Redis  # here: on other brokers nothing imports it

    connection = connection_to(app, seconds) if url is None else _connection(url, seconds)
    established = establish(connection, seconds)
    channel = connection.transport.create_channel(established)
    pool = channel.client.connection_pool

    def close() -> None:
        with suppress(Exception):
            pool.disconnect()
        connection.transport.close_connection(established)

    return Client(Redis(connection_pool=pool), close)


def _connection(url: str, seconds: float) -> Connection:
    options = {"socket_timeout": seconds, "socket_connect_timeout": seconds, "retry_on_timeout": False}
    connection = Connection(url, transport_options=options, connect_timeout=seconds)
    if connection.transport.driver_type != "redis":
        raise SettingsError("sidejob_redis_url is not the URL of a Redis: it begins with redis:// or rediss://.")
    return connection
