"""The demo's store and broker: throwaway servers of its own, or those that the environment names."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from kombu import Connection, Exchange, Queue
from kombu.exceptions import KombuError, OperationalError
from psycopg import sql

from celery_sidejob import SchemaError, SettingsError, embedded
from census_demo.brokers import Broker, Given, InStore, OwnRedis
from census_demo.store import connect

LOST_AFTER_S = 5
PATIENCE_S = 5.0
"""How long a given broker may take to answer."""


@dataclass(frozen=True)
class Servers:
    """A store and a broker."""

    own_store: bool
    database_url: str
    schema: str
    broker: Broker
    queue: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which workers, beat and the demo find the servers, and notice losses sooner than usual."""
        # Otherwise a direct URL of the user's would lead the workers to another store.
        direct = {"SIDEJOB_DIRECT_URL": self.database_url} if self.own_store else {}
        return direct | {
            "SIDEJOB_DATABASE_URL": self.database_url,
            "SIDEJOB_SCHEMA": self.schema,
            "SIDEJOB_LOST_AFTER": str(LOST_AFTER_S),
            "SIDEJOB_POLL_INTERVAL": "5",
            "CELERY_BROKER_URL": self.broker.url,
            "CENSUS_QUEUE": self.queue,
        }


@contextmanager
def running_servers(say: Callable[[str], object], kind: str | None) -> Iterator[Servers]:
    """Start the servers that are not given, and end them afterwards; our schema and queue in given servers are removed.

    `kind` is that of a broker of the demo's own: "redis", or "postgres" for the store itself; None is "postgres" if no
    broker is given. Given servers are checked before anything is started, and refused if they are unsuitable.
    """
    given_database = os.environ.get("SIDEJOB_DATABASE_URL")
    given_broker = os.environ.get("CELERY_BROKER_URL")
    # A name of its own for each census: given servers may still have rows of one that was killed.
    name = f"census_{secrets.token_hex(4)}"
    schema = os.environ.get("SIDEJOB_SCHEMA") or name
    with ExitStack() as started:
        if given_broker:
            _check_broker(given_broker, kind)
        if given_database:
            _check_store(given_database, schema)
            started.callback(_clear_up, say, f"the schema {schema}", _drop_schema, given_database, schema)
        if given_broker:
            started.callback(_clear_up, say, f"the queue {name}", _forget_queue, given_broker, name, schema)
        store = "the Postgres of SIDEJOB_DATABASE_URL" if given_database else "a Postgres of our own"
        if given_broker:
            beside = " and the broker of CELERY_BROKER_URL"
        else:
            beside = " and a Valkey of our own" if kind == "redis" else ", which is the broker too"
        say(f"Starting two workers of two processes each and a beat, on {store}{beside}")
        # It need not survive a power cut, so it can be faster.
        database_url = given_database or started.enter_context(embedded.Postgres(durable=False)).url
        broker: Broker
        if given_broker:
            broker = Given(given_broker)
        elif kind == "redis":
            broker = OwnRedis(started.enter_context(embedded.Valkey()).url)
        else:
            broker = InStore(database_url, schema)
        yield Servers(own_store=not given_database, database_url=database_url, schema=schema, broker=broker, queue=name)


def _check_broker(url: str, kind: str | None) -> None:
    """Raise SettingsError if the broker is not to be used, or cannot be reached; the workers would wait for it."""
    if kind is not None:
        raise SettingsError(
            f"--broker {kind} is for a broker of the demo's own, and CELERY_BROKER_URL names yours: leave one of them "
            "out."
        )
    if url.startswith("sidejobpg:"):
        raise SettingsError(
            "CELERY_BROKER_URL is a Postgres: set SIDEJOB_DATABASE_URL alone. The demo then makes the broker there "
            "too, in a schema of its own."
        )
    try:
        with Connection(url, connect_timeout=PATIENCE_S) as connection, connection_failures(connection):
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=PATIENCE_S)
    except (OperationalError, OSError, ValueError, KeyError, ImportError) as error:
        cause = error.__cause__ or error
        reason = cause.args[0] if isinstance(cause, KeyError) else str(cause).strip()
        raise SettingsError(f"The broker of CELERY_BROKER_URL cannot be used: {reason}") from error


@contextmanager
def connection_failures(connection: Connection) -> Iterator[None]:
    """Raise OperationalError in place of the errors of the broker's own library."""
    try:
        yield
    except (*connection.connection_errors, *connection.channel_errors) as error:
        raise OperationalError(str(error)) from error


def _check_store(url: str, schema: str) -> None:
    """Raise SettingsError if Postgres cannot be reached, SchemaError if it already has a schema of this name."""
    scheme, is_url, _ = url.partition("://")
    if is_url and scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise SettingsError(f"SIDEJOB_DATABASE_URL must begin with postgresql://, not with {scheme}://")
    try:
        with connect(url) as connection:
            row = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [schema]).fetchone()
    except psycopg.Error as error:
        raise SettingsError(f"The Postgres of SIDEJOB_DATABASE_URL cannot be used: {str(error).strip()}") from error
    if row is not None:
        raise SchemaError(
            f"Schema {schema!r} is there already, in the database of SIDEJOB_DATABASE_URL. The census makes a schema "
            "of its own, and drops it in the end: unset SIDEJOB_SCHEMA, or give it another name."
        )


def _clear_up(say: Callable[[str], object], what: str, work: Callable[..., None], *arguments: str) -> None:
    """Remove our schema or queue from a given server; if the server is away, say what is left there."""
    try:
        work(*arguments)
    except (psycopg.Error, KombuError, OSError) as error:
        say(f"{type(error).__name__}: {str(error).strip()}. What may be left there is {what}.")


def _drop_schema(database_url: str, schema: str) -> None:
    with connect(database_url) as connection:
        connection.execute("SET lock_timeout = '10s'")
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


def _forget_queue(broker_url: str, name: str, schema: str) -> None:
    with Connection(broker_url, connect_timeout=PATIENCE_S) as connection, connection_failures(connection):
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=PATIENCE_S)
        channel = connection.default_channel
        queue = Queue(name, Exchange(name), routing_key=name)(channel)
        queue.declare()
        queue.delete()
        queue.exchange.delete()
        if connection.transport.driver_type == "redis":
            _forget_fetched(channel, name)
            _forget_mailboxes(channel, name)
            channel.client.delete(f"celery_sidejob:marker:{schema}")


def _forget_fetched(channel: Any, name: str) -> None:
    """Remove the messages that the killed worker had fetched: kombu would restore them an hour later."""
    for tag, fetched in list(channel.client.hscan_iter(channel.unacked_key)):
        if json.loads(fetched)[2] == name:  # its routing key
            channel.client.zrem(channel.unacked_index_key, tag)
            channel.client.hdel(channel.unacked_key, tag)


def _forget_mailboxes(channel: Any, name: str) -> None:
    """Remove the killed worker's mailbox for remote control; a worker that stops removes its own."""
    exchange = "celery.pidbox"
    bindings = channel.keyprefix_queue % exchange
    for binding in channel.client.smembers(bindings):
        mailbox = binding.decode().rpartition(channel.sep)[2]
        if mailbox.startswith(name):
            channel.client.srem(bindings, binding)
            channel.client.delete(mailbox)
    if not channel.client.exists(bindings):  # no worker of others is there
        channel.client.zrem("_kombu.binding_deadlines", exchange)
