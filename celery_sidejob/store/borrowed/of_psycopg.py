"""The caller's own open transaction if it is psycopg's.

Where it is asynchronous, our statements are awaited in the caller's event loop. They are written for synchronous
connections, so they run in a greenlet, out of which each one is awaited, as SQLAlchemy's own synchronous half does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from ...model.errors import MissingLibraryError
from ..statement import row_type, rows
from .borrowed import Borrowed


class PsycopgTransaction(Borrowed):
    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        super().__init__(schema)
        self._connection = connection
        self._cursor = psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)
        self._autocommit = connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE

    @property
    def autocommit(self) -> bool:
        return self._autocommit

    def after_commit(self, call: Callable[[], None]) -> None:
        if self._autocommit:
            call()

    @property
    def tells_of_commits(self) -> bool:
        return self._autocommit

    @property
    def has_broken(self) -> bool:
        return self._connection.broken

    def roll_back(self) -> None:
        self._connection.rollback()

    def _driver(self) -> Any:
        return self._connection

    def _execute(self, text: str, parameters: dict[str, Any] | None = None) -> Sequence[Any]:
        self._cursor.execute(text, parameters, prepare=False)  # no prepared statements in the caller's session
        return rows(self._cursor)


T = TypeVar("T")


class AwaitedTransaction(PsycopgTransaction):
    """A transaction of psycopg's AsyncConnection, for work that `spawn` does."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], schema: str) -> None:
        Borrowed.__init__(self, schema)
        self._connection: Any = connection
        self._awaited = psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row)
        self._autocommit = connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE

    def roll_back(self) -> None:
        """Roll it back, which is done at once: nothing can be awaited where a run ends."""
        self._connection.pgconn.exec_(b"ROLLBACK")

    def _execute(self, text: str, parameters: dict[str, Any] | None = None) -> Sequence[Any]:
        cursor = self._awaited
        _greenlets().await_only(cursor.execute(text, parameters, prepare=False))
        if cursor.description is None:
            return []
        row = row_type(tuple(column.name for column in cursor.description))
        return [*map(row._make, _greenlets().await_only(cursor.fetchall()))]


@dataclass(frozen=True, slots=True)
class Awaited:
    """Psycopg's AsyncConnection, for work that `spawn` does."""

    connection: psycopg.AsyncConnection[Any]


async def spawn(work: Callable[[], T]) -> T:
    """Do synchronous work in which the statements of an asynchronous transaction are awaited."""
    done: T = await _greenlets().greenlet_spawn(work)
    return done


def _greenlets() -> Any:
    try:
        import greenlet  # noqa: F401 - SQLAlchemy says only when it is used that it misses it
    except ImportError as error:
        raise MissingLibraryError(
            'transaction= with an asynchronous connection needs greenlet: pip install "celery-sidejob[asyncio]".'
        ) from error
    from sqlalchemy.util import concurrency

    return concurrency


def half(transaction: Any) -> tuple[Any, bool]:
    """Return what to give a synchronous verb for a transaction, and whether the verb is called by `spawn`.

    Raises TypeError for a transaction that the verb would not find in another thread.
    """
    if isinstance(transaction, psycopg.AsyncConnection):
        return Awaited(transaction), True
    kind = type(transaction)
    if kind.__module__.startswith("sqlalchemy.ext.asyncio"):
        if kind.__name__ == "async_scoped_session":
            transaction = transaction()
        return getattr(transaction, "sync_session", None) or transaction.sync_connection, True
    if "sqlalchemy" in sys.modules:
        from sqlalchemy.orm import scoped_session

        if isinstance(transaction, scoped_session):
            return transaction(), False  # of this thread
    if isinstance(transaction, str) or hasattr(transaction, "alias"):
        raise TypeError(
            "transaction= cannot be a connection of Django in an awaited call: it belongs to the thread of its "
            "transaction. Make the call in the function that you give to sync_to_async(), as "
            '`task.enqueue(..., transaction="default")`.'
        )
    return transaction, False
