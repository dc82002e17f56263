"""The caller's own open transaction if it is psycopg's.

Where it is asynchronous, our statements are awaited in the caller's event loop. They are written for synchronous
connections, so they run in a greenlet, out of which each one is awaited, as SQLAlchemy's own synchronous half does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from ...model.errors import MissingLibraryError
from ..statement import row_type, rows
from .borrowed import Borrowed


class PsycopgTransaction(Borrowed):
    _of_cursors: Any = psycopg.Cursor

    def __init__(self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], schema: str) -> None:
        super().__init__(schema)
        self._connection: Any = connection
        self._cursor = self._of_cursors(connection, row_factory=psycopg.rows.tuple_row)
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
        return bool(self._connection.broken)

    def roll_back(self) -> None:
        self._connection.rollback()

    def _driver(self) -> Any:
        return self._connection

    def _execute(self, text: str, parameters: dict[str, Any] | None = None) -> Sequence[Any]:
        self._cursor.execute(text, parameters, prepare=False)  # no prepared statements in the caller's session
        return rows(self._cursor)


class AwaitedTransaction(PsycopgTransaction):
    """A transaction of psycopg's AsyncConnection, for work that `lending.spawn` does."""

    _of_cursors = psycopg.AsyncCursor

    def roll_back(self) -> None:
        """Roll it back, which is done at once: nothing can be awaited where a run ends."""
        self._connection.pgconn.exec_(b"ROLLBACK")

    def _execute(self, text: str, parameters: dict[str, Any] | None = None) -> Sequence[Any]:
        greenlets().await_only(self._cursor.execute(text, parameters, prepare=False))
        if self._cursor.description is None:
            return []
        row = row_type(tuple(column.name for column in self._cursor.description))
        return [*map(row._make, greenlets().await_only(self._cursor.fetchall()))]


@dataclass(frozen=True, slots=True)
class Awaited:
    """Psycopg's AsyncConnection, for work that `lending.spawn` does."""

    connection: psycopg.AsyncConnection[Any]


def greenlets() -> Any:
    """Return the half of SQLAlchemy that awaits out of synchronous code."""
    try:
        import greenlet  # noqa: F401 - SQLAlchemy says only when it is used that it misses it
    except ImportError as error:
        raise MissingLibraryError(
            'transaction= with an asynchronous connection needs greenlet: pip install "celery-sidejob[asyncio]".'
        ) from error
    from sqlalchemy.util import concurrency

    return concurrency
