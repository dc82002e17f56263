"""Whoever lends us a transaction: SQLAlchemy, psycopg and Django under one set of verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool


class Lender:
    """An open connection of the caller's own; `transaction` is what is given to us."""

    tells_of_commits = True
    """Whether we are told of its commits; where not, the sweeper does what must follow them."""

    def __init__(self, transaction: Any) -> None:
        self.transaction = transaction

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        """Run the caller's own SQL, and return the rows."""
        raise NotImplementedError

    def commit(self) -> None:
        raise NotImplementedError

    def rollback(self) -> None:
        raise NotImplementedError

    def savepoint(self) -> AbstractContextManager[Any]:
        """A block that an exception rolls back alone, and its end does not commit."""
        raise NotImplementedError


class _Engine(Lender):
    def sql(self, text: str) -> list[tuple[Any, ...]]:
        result = self.transaction.exec_driver_sql(text)
        return [tuple(row) for row in result] if result.returns_rows else []

    def commit(self) -> None:
        self.transaction.commit()

    def rollback(self) -> None:
        self.transaction.rollback()

    def savepoint(self) -> AbstractContextManager[Any]:
        return self.transaction.begin_nested()


class _Session(_Engine):
    def sql(self, text: str) -> list[tuple[Any, ...]]:
        result = self.transaction.connection().exec_driver_sql(text)
        return [tuple(row) for row in result] if result.returns_rows else []


class _Psycopg(Lender):
    tells_of_commits = False

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        cursor = psycopg.Cursor(self.transaction, row_factory=psycopg.rows.tuple_row).execute(text)
        return cursor.fetchall() if cursor.description else []

    def commit(self) -> None:
        self.transaction.commit()

    def rollback(self) -> None:
        self.transaction.rollback()

    def savepoint(self) -> AbstractContextManager[Any]:
        return self.transaction.transaction()


class _Django(Lender):
    def __init__(self, transaction: Any) -> None:
        from django.db import connections
        from django.db import transaction as django_transaction

        super().__init__(transaction)
        self._connection = connections["default"]
        self._atomic = django_transaction.atomic
        self._outermost = self._atomic()
        self._outermost.__enter__()

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(text)
            return cursor.fetchall() if cursor.description else []

    def commit(self) -> None:
        self._outermost.__exit__(None, None, None)
        self._begin()

    def rollback(self) -> None:
        self._connection.set_rollback(True)
        self._outermost.__exit__(None, None, None)
        self._begin()

    def savepoint(self) -> AbstractContextManager[Any]:
        return self._atomic()

    def _begin(self) -> None:
        self._outermost = self._atomic()
        self._outermost.__enter__()


class _DjangoManual(Lender):
    """Django without its own transaction management: it has no hook there."""

    tells_of_commits = False

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        with self.transaction.cursor() as cursor:
            cursor.execute(text)
            return cursor.fetchall() if cursor.description else []

    def commit(self) -> None:
        self.transaction.commit()

    def rollback(self) -> None:
        self.transaction.rollback()

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        name = self.transaction.savepoint()
        try:
            yield
        except BaseException:
            self.transaction.savepoint_rollback(name)
            raise
        self.transaction.savepoint_commit(name)


@contextmanager
def _engine(driver: str, url: str, **options: Any) -> Iterator[Lender]:
    engine = _engine_of(driver, url, **options)
    with engine.connect() as connection:
        yield _Engine(connection)


def _engine_of(driver: str, url: str, **options: Any) -> Engine:
    """An engine as one has it that may lead through a PgBouncer."""
    arguments = {"prepare_threshold": None} if driver == "psycopg" else {}
    url = url.replace("postgresql://", f"postgresql+{driver}://")
    return create_engine(url, poolclass=NullPool, connect_args=arguments, **options)


@contextmanager
def _session(driver: str, url: str) -> Iterator[Lender]:
    engine = _engine_of(driver, url)
    with Session(engine) as session:
        yield _Session(session)


@contextmanager
def _psycopg(url: str) -> Iterator[Lender]:
    with psycopg.connect(url, row_factory=psycopg.rows.dict_row, prepare_threshold=None) as connection:
        yield _Psycopg(connection)


@contextmanager
def django_database(url: str) -> Iterator[Any]:
    """Have Django's default database be the one of this URL; yields its connection, in autocommit."""
    import django
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        settings.configure(DATABASES={})
        django.setup()
    parts = urlsplit(url)
    connections.settings = connections.configure_settings(
        {
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts.path.lstrip("/"),
                "USER": parts.username or "",
                "PASSWORD": parts.password or "",
                "HOST": parts.hostname or "",
                "PORT": str(parts.port or ""),
            }
        }
    )
    connections["default"] = connections.create_connection("default")
    try:
        yield connections["default"]
    finally:
        connections["default"].close()


@contextmanager
def _django(url: str) -> Iterator[Lender]:
    with django_database(url):
        yield _Django("default")


@contextmanager
def _django_manual(url: str) -> Iterator[Lender]:
    with django_database(url) as connection:
        connection.set_autocommit(False)
        yield _DjangoManual(connection)


LENDERS: dict[str, Callable[[str], AbstractContextManager[Lender]]] = {
    "connection-psycopg": lambda url: _engine("psycopg", url),
    "connection-psycopg2": lambda url: _engine("psycopg2", url),
    "session-psycopg": lambda url: _session("psycopg", url),
    "session-psycopg2": lambda url: _session("psycopg2", url),
    "psycopg": _psycopg,
    "django": _django,
    "django-manual": _django_manual,
}
"""By name: what opens one on the database of a URL."""
