"""Databases of one Postgres: one template, migrated once, and a fresh clone of it for each test."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from tests.tools.pgbouncer import direct, pooling

SCHEMA = "sidejob"


def prepare_template(url: str) -> None:
    """Make the empty database at `url` what each test's database starts as: our schema, nothing in it."""
    from celery_sidejob.store.schema.migrate import upgrade  # here, for tests that need no database of ours

    upgrade(url, schema=SCHEMA)


@contextmanager
def only_reading(url: str, *, ends_sessions: bool = False) -> Iterator[None]:
    """Within the block sessions that begin in the database of `url` take no writes: what a failover may lead to.

    Those that are open go on as they are, or end.
    """
    proxy = pooling(url)
    with psycopg.connect(direct(url), autocommit=True, options="-c default_transaction_read_only=off") as connection:
        name = connection.info.dbname

        def change(how: str) -> None:
            connection.execute(sql.SQL(f"ALTER DATABASE {{}} {how}").format(sql.Identifier(name)))
            if proxy is not None:
                proxy.reconnect(name)

        change("SET default_transaction_read_only = on")
        if ends_sessions:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
                [name],
            )
        try:
            yield
        finally:
            change("RESET default_transaction_read_only")


class Databases:
    """Makes and drops databases on the server of an administrator's URL."""

    def __init__(self, admin_url: str) -> None:
        self.admin_url = admin_url

    def url_of(self, name: str) -> str:
        """The administrator's URL with another database."""
        return urlsplit(self.admin_url)._replace(path=f"/{name}").geturl()

    @contextmanager
    def fresh(self, *, template: str = "template1") -> Iterator[str]:
        """A database of its own within the block, cloned from `template`; yields its name."""
        name = f"sidejob_test_{secrets.token_hex(6)}"
        self._execute("CREATE DATABASE {} TEMPLATE {}", name, template)
        try:
            yield name
        finally:
            # FORCE: what a test has left connected, even frozen, must not keep the database.
            self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def close_for_cloning(self, name: str) -> None:
        """Let nobody connect to `name` from now on: a database that is in use cannot be cloned."""
        self._execute("ALTER DATABASE {} WITH ALLOW_CONNECTIONS false", name)
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])

    def _execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
