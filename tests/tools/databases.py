"""Databases of one Postgres: one template, migrated once, and a fresh clone of it for each test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from celery_sidejob.testing.databases import Databases
from tests.tools.pgbouncer import direct, pooling

__all__ = ["SCHEMA", "Databases", "defaults", "only_reading", "prepare_template"]

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
