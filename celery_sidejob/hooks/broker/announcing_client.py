"""A client of Redis for announcements, with the connections that kombu would make: sentinels, TLS and passwords too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from celery import Celery
from kombu import Connection

from ...announcements.over_redis import ANSWER_S, Client
from ...model.errors import SettingsError
from ...model.finding import Finding, warning, well
from ..configuration import settings_of
from .attempt import connection_to, establish


def findings(app: Celery) -> Iterator[Finding]:
    """Yield what `doctor` finds of the Redis of `sidejob_redis_url`, with one bounded attempt; nothing without one."""
    url = settings_of(app).redis_url
    if url is None:
        return
    shown = Connection(url).as_uri()
    try:
        client = client_of(app, url, ANSWER_S)
        try:
            client.redis.ping()
        finally:
            client.close()
    except Exception as failure:  # whatever a transport or redis-py raises
        yield warning(
            "announcements",
            f"{shown}: {type(failure).__name__}: {failure}",
            meaning="Nobody hears announcements, and "
            "subscribe() fails. Jobs, packets and publications are not concerned.",
            remedy="Start that Redis, or correct sidejob_redis_url.",
        )
    else:
        yield well("announcements", f"{shown} answers")


def check_url(url: str | None) -> None:
    """Raise SettingsError if this is not the URL of a Redis; connects to nothing."""
    if url is None:
        return
    try:
        is_redis = Connection(url).get_transport_cls().driver_type == "redis"
    except (KeyError, ImportError, ValueError):  # kombu knows no such transport, or cannot read the rest
        is_redis = False
    if not is_redis:
        raise SettingsError("sidejob_redis_url is not the URL of a Redis: it begins with redis:// or rediss://.")


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
    check_url(url)
    options = {"socket_timeout": seconds, "socket_connect_timeout": seconds, "retry_on_timeout": False}
    return Connection(url, transport_options=options, connect_timeout=seconds)
