"""The servers of a trial, and the networks before them that fail on request."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack, suppress
from typing import Self

import psycopg
import redis
from amqp.exceptions import NotFound
from kombu import Connection

from celery_sidejob import embedded
from tests.tools.databases import prepare_template
from tests.tools.proxy import TcpProxy
from tests.tools.rabbitmq import MISSING, RabbitMQ, is_installed

PRELOADED = "pg_stat_statements"


class RedisBroker:
    """A Valkey of our own."""

    name = "redis"

    def __init__(self, server: embedded.Valkey) -> None:
        self.server: embedded.Valkey | None = server
        self.url = server.url

    def empty(self) -> None:
        """Take everything from it."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()


class RabbitBroker:
    """A RabbitMQ of our own, or one that we were given: then its queues are ours, its process is not."""

    name = "rabbitmq"

    def __init__(self, url: str, queue: str, server: RabbitMQ | None = None) -> None:
        self.server = server
        self.url = url
        self._queue = queue
        self._times = itertools.count()

    def empty(self) -> None:
        """Take all messages from our queue, or the whole queue, in turns."""
        with Connection(self.url) as connection, suppress(NotFound):  # it was not declared again yet
            channel = connection.default_channel
            (channel.queue_delete if next(self._times) % 2 else channel.queue_purge)(self._queue)


class StoreBroker:
    """The store itself: what befalls its process or its network befalls both."""

    name = "postgres"
    server = None
    url = "sidejobpg://"

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url

    def empty(self) -> None:
        """Take everything from it that is the broker's, unless it is away just now."""
        with (
            suppress(psycopg.OperationalError),
            psycopg.connect(self._database_url, autocommit=True) as connection,
        ):
            connection.execute("DELETE FROM sidejob.broker_messages")


class Ground:
    """Postgres, a broker, and a proxy before each, within a `with` block."""

    postgres: embedded.Postgres
    broker: RedisBroker | RabbitBroker | StoreBroker
    store_net: TcpProxy
    broker_net: TcpProxy

    def __init__(self, broker: str, *, queue: str, notes: str, results_apart: bool = False) -> None:
        """`notes`: SQL that makes what the store itself notes. `results_apart`: in a Redis to which nothing happens."""
        self._kind = broker
        self._notes = notes
        self._queue = queue
        self._results_apart = results_apart or broker != "redis"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.postgres = stack.enter_context(embedded.Postgres(durable=False))
            if self._results_apart:
                self._backend_url = stack.enter_context(embedded.Valkey()).url
            if self._kind == "redis":
                self.broker = RedisBroker(stack.enter_context(embedded.Valkey()))
            elif self._kind == "postgres":
                self.broker = StoreBroker(self.postgres.url)
            else:
                self.broker = _rabbitmq(stack, self._queue)
            self._prepare_store()
            self.store_net = stack.enter_context(TcpProxy.to(self.postgres.url))
            self.broker_net = self.store_net
            if self._kind != "postgres":
                self.broker_net = stack.enter_context(TcpProxy.to(self.broker.url))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def database_url(self) -> str:
        """The store, past the proxy: for those who judge."""
        return self.postgres.url

    @property
    def aside_url(self) -> str:
        """Another database of the same server, so that what is asked there does not count in the store's figures."""
        return self.postgres.url.rpartition("/")[0] + "/postgres"

    @property
    def env(self) -> dict[str, str]:
        """What workers and clients need to know."""
        broker_url = self.broker.url
        if self.broker_net is not self.store_net:
            broker_url = self.broker_net.url_for(broker_url)
        return {
            "SIDEJOB_DATABASE_URL": self.store_net.url_for(self.postgres.url),
            "BROKER_URL": broker_url,
            "RESULT_BACKEND": self._backend_url if self._results_apart else broker_url,
        }

    def _prepare_store(self) -> None:
        with psycopg.connect(self.aside_url, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET shared_preload_libraries = '{PRELOADED}'")
        self.postgres.restart()
        with psycopg.connect(self.aside_url, autocommit=True) as connection:
            connection.execute(f"CREATE EXTENSION {PRELOADED}")
        prepare_template(self.postgres.url)
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            connection.execute(self._notes)


def _rabbitmq(stack: ExitStack, queue: str) -> RabbitBroker:
    """The RabbitMQ of the environment, or else one of our own."""
    given = os.environ.get("SIDEJOB_TEST_AMQP_URL")
    if given:
        return RabbitBroker(given, queue)
    if not is_installed():
        raise SystemExit(MISSING)
    server = stack.enter_context(RabbitMQ())
    return RabbitBroker(server.url, queue, server)
