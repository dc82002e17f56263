"""What tests of `sidejobpg://` are given: a broker of their own by its URL, and a look into its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from celery import Celery
from kombu import Connection

import celery_sidejob.transport  # noqa: F401  # makes sidejobpg:// known
from celery_sidejob.transport.postgres.link import APPLICATION
from tests.tools.brokers import in_postgres
from tests.tools.pgbouncer import direct


class Tables:
    """Looks into the broker's tables, and ends sessions."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True, options="-c search_path=sidejob")

    def one(self, statement: str, *parameters: Any) -> Any:
        """The first column of the only row."""
        row = self._connection.execute(statement, parameters).fetchone()
        assert row is not None
        return row[0]

    def run(self, statement: str, *parameters: Any) -> None:
        """Run a statement that returns nothing."""
        self._connection.execute(statement, parameters)

    @property
    def waiting(self) -> int:
        """How many messages nobody holds."""
        return int(self.one("SELECT count(*) FROM broker_messages WHERE holder IS NULL"))

    @property
    def held(self) -> int:
        """How many messages somebody holds, dead or alive."""
        return int(self.one("SELECT count(*) FROM broker_messages WHERE holder IS NOT NULL"))

    @property
    def all(self) -> int:
        """How many messages there are."""
        return int(self.one("SELECT count(*) FROM broker_messages"))

    @property
    def consumers(self) -> int:
        """How many consumers are registered."""
        return int(self.one("SELECT count(*) FROM broker_consumers"))

    def end_sessions(self, *, locked: bool | None = None) -> int:
        """End sessions of the broker's users: those of hearts (`locked`), those of statements, or all."""
        statement = f"""
            SELECT count(pg_terminate_backend(a.pid)) FROM pg_stat_activity a
            WHERE a.application_name = '{APPLICATION}' AND a.datname = current_database()"""
        if locked is not None:
            statement += f""" AND {"" if locked else "NOT"} EXISTS (
                SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'advisory')"""
        return int(self.one(statement))

    def analyse(self) -> None:
        """Have Postgres look at what the messages are like, as autovacuum does."""
        self._connection.execute("ANALYZE broker_messages")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@pytest.fixture
def broker_url(database_url: str) -> str:
    """The URL of an empty broker."""
    return in_postgres(database_url)


@pytest.fixture
def tables(database_url: str) -> Iterator[Tables]:
    """The same, as Postgres sees it."""
    looking = Tables(direct(database_url))
    yield looking
    looking.close()


@pytest.fixture
def connect(broker_url: str) -> Iterator[Callable[..., Connection]]:
    """Opens connections to the broker, with transport options as keywords; they are closed after the test."""
    with ExitStack() as stack:

        def open_one(url: str = broker_url, **options: Any) -> Connection:
            return stack.enter_context(Connection(url, transport_options=options))

        yield open_one


@pytest.fixture
def client(broker_url: str) -> Iterator[Celery]:
    """A plain app that sends tasks and commands."""
    with Celery("client", broker=broker_url, set_as_current=False) as app:
        yield app
