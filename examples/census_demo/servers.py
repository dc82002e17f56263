"""Where the demo's store and broker are: throwaway ones of its own, or those that the environment names."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psycopg
from kombu import Connection, Exchange, Queue
from psycopg import sql

from celery_sidejob import embedded
from census_demo.store import plain_url

LOST_AFTER_S = 5


@dataclass(frozen=True)
class Servers:
    """A store and a broker. `own_broker` is ours to do with as we like; None for one that was given."""

    database_url: str
    schema: str
    broker_url: str
    queue: str
    own_broker: embedded.Valkey | None
    description: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which workers, beat and we find them, and notice losses sooner than usual."""
        return {
            "SIDEJOB_DATABASE_URL": self.database_url,
            "SIDEJOB_SCHEMA": self.schema,
            "SIDEJOB_LOST_AFTER": str(LOST_AFTER_S),
            "SIDEJOB_POLL_INTERVAL": "5",
            "CELERY_BROKER_URL": self.broker_url,
            "CENSUS_QUEUE": self.queue,
        }


@contextmanager
def running_servers() -> Iterator[Servers]:
    """Start what is not given; in the end it is gone again, and so are our schema and our queue in what was given."""
    given_database = os.environ.get("SIDEJOB_DATABASE_URL")
    given_broker = os.environ.get("CELERY_BROKER_URL")
    given_schema = os.environ.get("SIDEJOB_SCHEMA")
    # Of this census alone, for servers that were given may have seen another one, perhaps killed half-way.
    name = f"census_{secrets.token_hex(4)}"
    schema = given_schema or name
    with ExitStack() as started:
        # It need not survive a power cut, and is faster for it.
        database_url = given_database or started.enter_context(embedded.Postgres(durable=False)).url
        if given_database and not given_schema:
            started.callback(_drop_schema, database_url, schema)
        own_broker = None if given_broker else started.enter_context(embedded.Valkey())
        if given_broker:
            started.callback(_delete_queue, given_broker, name)
        yield Servers(
            database_url=database_url,
            schema=schema,
            broker_url=own_broker.url if own_broker else given_broker or "",
            queue=name,
            own_broker=own_broker,
            description=" and ".join(
                [
                    "the Postgres of SIDEJOB_DATABASE_URL" if given_database else "a Postgres of our own",
                    "the broker of CELERY_BROKER_URL" if given_broker else "a Valkey of our own",
                ]
            ),
        )


def _drop_schema(database_url: str, schema: str) -> None:
    with psycopg.connect(plain_url(database_url), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


def _delete_queue(broker_url: str, name: str) -> None:
    with Connection(broker_url) as connection:
        queue = Queue(name, Exchange(name), routing_key=name)(connection.default_channel)
        queue.declare()
        queue.delete()
        queue.exchange.delete()
