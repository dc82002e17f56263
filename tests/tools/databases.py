"""Databases of one Postgres: one template, migrated once, and a fresh clone of it for each test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import psycopg
from psycopg import sql

from celery_sidejob.testing import databases
from tests.tools.pgbouncer import direct, pooling

__all__ = ["SCHEMA", "Databases", "Eye", "close_for_cloning", "defaults", "only_reading", "prepare_template"]

SCHEMA = "sidejob"


class Eye:
    """Looks at a store, past any proxy, on a connection that it keeps: to open one takes ten times as long as to look.

    Another one follows where the server has ended it. It is in autocommit, and prepares nothing: a test may change
    tables.
    """

    def __init__(self, url: str, schema: str = SCHEMA) -> None:
        self._url = direct(url)
        self._schema = schema
        self._connection: psycopg.Connection[Any] | None = None

    def rows(self, statement: str, *parameters: Any) -> list[Any]:
        """Run SQL in the schema and return the rows, as named tuples."""
        try:
            return self._rows(statement, parameters)
        except psycopg.OperationalError:
            if self._connection is not None and not self._connection.broken:
                raise
            self.close()
            return self._rows(statement, parameters)

    def _rows(self, statement: str, parameters: tuple[Any, ...]) -> list[Any]:
        if self._connection is None:
            self._connection = psycopg.connect(
                self._url, autocommit=True, prepare_threshold=None, options=f"-c search_path={self._schema}",
                row_factory=psycopg.rows.namedtuple_row,
            )  # fmt: skip
        cursor = self._connection.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Close its connection; the next look opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()


class Databases(databases.Databases):
    """Makes and drops databases on a server, over one connection."""

    def __init__(self, admin_url: str) -> None:
        super().__init__(admin_url)
        self._eye = Eye(admin_url)

    def _execute(self, statement: str, *names: str) -> None:
        self._eye.rows(sql.SQL(statement).format(*map(sql.Identifier, names)).as_string())

    def close(self) -> None:
        """Close the connection."""
        self._eye.close()


def prepare_template(url: str) -> None:
    """Make the empty database at `url` what each test's database starts as: our schema, nothing in it."""
    from celery_sidejob.store.schema.migrate import upgrade  # here, for tests that need no database of ours

    upgrade(url, schema=SCHEMA)


@contextmanager
def only_reading(url: str, *, ends_sessions: bool = False) -> Iterator[None]:
    """Within the block sessions that begin in the database of `url` take no writes: what a failover may lead to.

    Those that are open go on as they are, or end.
    """
    with defaults(url, {"default_transaction_read_only": "on"}) as connection:
        if ends_sessions:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
                [connection.info.dbname],
            )
        yield


@contextmanager
def defaults(url: str, settings: Mapping[str, str]) -> Iterator[psycopg.Connection[Any]]:
    """Within the block sessions that begin in the database of `url` have these settings, as if their role had them."""
    proxy = pooling(url)
    with psycopg.connect(direct(url), autocommit=True, options="-c default_transaction_read_only=off") as connection:
        name = connection.info.dbname

        def change(*changes: str) -> None:
            for one in changes:
                connection.execute(sql.SQL(f"ALTER DATABASE {{}} {one}").format(sql.Identifier(name)))
            if proxy is not None:
                proxy.reconnect(name)

        change(*(f"SET {setting} = {value}" for setting, value in settings.items()))
        try:
            yield connection
        finally:
            change(*(f"RESET {setting}" for setting in settings))


def close_for_cloning(databases: Databases, name: str) -> None:
    """Refuse new connections to a database from now on: one that is in use cannot be cloned."""
    with psycopg.connect(databases.admin_url, autocommit=True) as connection:
        connection.execute(sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS false").format(sql.Identifier(name)))
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
