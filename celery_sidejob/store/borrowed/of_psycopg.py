"""The caller's own open transaction if it is psycopg's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from ..statement import rows
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
