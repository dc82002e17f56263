"""The caller's own open transaction if it is Django's; imported only if it may be one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionDoesNotExist, ConnectionProxy

from ..statement import rows
from .borrowed import Borrowed, broke


def adapt(transaction: Any, schema: str) -> Borrowed | None:
    """Return an executor over Django's connection, or an alias's connection; None for anything else."""
    if isinstance(transaction, str):
        return _DjangoTransaction(connection_of(transaction), schema)
    if isinstance(transaction, ConnectionProxy | BaseDatabaseWrapper):
        return _DjangoTransaction(transaction, schema)
    return None


def owners(transaction: Any) -> tuple[Any, ...] | None:
    """Return the connection and the connection of its alias; None for anything that is not Django's."""
    alias = transaction if isinstance(transaction, str) else getattr(transaction, "alias", None)
    return None if alias is None else (transaction, connection_of(alias))


def connection_of(alias: str) -> Any:
    """Return the connection of an alias; TypeError without one."""
    try:
        return connections[alias]
    except (ConnectionDoesNotExist, ImproperlyConfigured) as error:
        raise TypeError(f"transaction={alias!r} names no connection of Django's DATABASES: {error}") from error


class _DjangoTransaction(Borrowed):
    def __init__(self, connection: Any, schema: str) -> None:
        super().__init__(schema)
        if connection.vendor != "postgresql":
            raise TypeError(f"transaction= needs a Django connection to PostgreSQL, not to {connection.vendor}.")
        self._connection = connection
        self._lent = self._driver()  # Django gives up a connection that broke

    @property
    def autocommit(self) -> bool:
        return bool(not self._connection.in_atomic_block and self._connection.get_autocommit())

    @property
    def never_commits(self) -> bool:
        # Django marks the blocks of `TestCase`, for its check of durable blocks; an older Django has no list of blocks.
        return any(getattr(block, "_from_testcase", False) for block in getattr(self._connection, "atomic_blocks", ()))

    def after_commit(self, call: Callable[[], None]) -> None:
        if self.tells_of_commits:
            self._connection.on_commit(call)

    @property
    def tells_of_commits(self) -> bool:
        return bool(self._connection.in_atomic_block or self._connection.get_autocommit())

    def watch_commit(self) -> Callable[[], bool]:
        if not self.tells_of_commits:
            return super().watch_commit()
        heard = threading.Event()
        self._connection.on_commit(heard.set)
        return heard.is_set

    @property
    def has_broken(self) -> bool:
        return broke(self._lent)

    def roll_back(self) -> None:
        if self._connection.in_atomic_block:  # entered by hand and never exited: Django has no other way out
            self._connection.close()
        else:
            self._connection.rollback()

    def _driver(self) -> Any:
        self._connection.ensure_connection()
        return self._connection.connection

    def _execute(self, text: str, parameters: dict[str, Any] | None = None) -> Sequence[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute(text, parameters)
            return rows(cursor)
