"""The caller's own open transaction: SQLAlchemy, psycopg or Django. Only used, never owned.

It is never wrapped in an engine, committed, rolled back or reconfigured. Statements run on it as if the caller had
written them; what must follow its commit is handed to `after_commit`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import event
from sqlalchemy.engine import Connection as EngineConnection
from sqlalchemy.orm import Session, scoped_session

from ..model.errors import SchemaError
from .statement import Statement, rows

PENDING = "celery_sidejob_after_commit"

_HAS_SCHEMA = Statement("SELECT to_regclass(%(table)s) IS NOT NULL AS found")


class Borrowed:
    """An executor over a transaction of the caller's."""

    knows_commit = True
    """Whether `after_commit` is called at the commit; where it is not (psycopg), the sweeper does what must follow."""

    def __init__(self, schema: str) -> None:
        self._schema = schema

    def run(self, statement: Statement, /, **parameters: Any) -> Sequence[Any]:
        """Run one statement in the caller's transaction and return its rows."""
        raise NotImplementedError

    def after_commit(self, call: Callable[[], None], rolled_back: Callable[[], None] | None = None) -> None:
        """Have `call` called once after the outermost commit, `rolled_back` once after a rollback of the whole."""
        raise NotImplementedError

    @property
    def settled(self) -> bool:
        """Whether the transaction that was open when we were lent the connection is over."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse a connection to a database without our schema, before any statement can spoil the transaction."""
        found = self.run(_HAS_SCHEMA, table=f'"{self._schema}".jobs')
        if not found[0].found:
            raise SchemaError(
                f"transaction= leads to a database without the schema {self._schema!r}. It must be the database of "
                "sidejob_database_url, so that your rows and the job can commit together."
            )


def borrow(transaction: Any, schema: str) -> Borrowed:
    """Return an executor over the caller's transaction; TypeError for anything that is not one."""
    if isinstance(transaction, Borrowed):
        return transaction
    borrowed = _adapt(transaction, schema)
    borrowed.check()
    return borrowed


def _adapt(transaction: Any, schema: str) -> Borrowed:
    if isinstance(transaction, scoped_session):
        transaction = transaction()
    if isinstance(transaction, Session):
        return _SessionTransaction(transaction, schema)
    if isinstance(transaction, EngineConnection):
        return _EngineTransaction(transaction, schema)
    if isinstance(transaction, psycopg.Connection):
        return _PsycopgTransaction(transaction, schema)
    if "django.db" in sys.modules:
        from django.db import connections
        from django.db.backends.base.base import BaseDatabaseWrapper
        from django.utils.connection import ConnectionProxy

        if isinstance(transaction, str):
            return _DjangoTransaction(connections[transaction], schema)
        if isinstance(transaction, ConnectionProxy | BaseDatabaseWrapper):
            return _DjangoTransaction(transaction, schema)
    raise TypeError(
        "transaction= takes a SQLAlchemy Connection or Session, a psycopg Connection, or a Django connection or its "
        f"alias (not asynchronous ones), not {type(transaction).__name__}."
    )


class _EngineTransaction(Borrowed):
    def __init__(self, connection: EngineConnection, schema: str) -> None:
        super().__init__(schema)
        _check_dialect(connection)
        self._connection = connection
        connection.exec_driver_sql("SELECT 1")  # begins the caller's transaction where autobegin has not yet
        self._transaction = connection.get_transaction()

    def run(self, statement: Statement, /, **parameters: Any) -> Sequence[Any]:
        return _run_on_engine(self._connection, statement.render(self._schema), parameters)

    def after_commit(self, call: Callable[[], None], rolled_back: Callable[[], None] | None = None) -> None:
        # SQLAlchemy tells of a connection's commit just before it is sent: the rest waits, in a thread of its own,
        # until the transaction is over. If the process dies in between, the sweeper finds the rows.
        transaction = self._transaction

        def committing(connection: EngineConnection) -> None:
            if connection.in_nested_transaction():
                return
            threading.Thread(target=_when, args=(lambda: not _active(transaction), call), daemon=True).start()
            remove()

        def rolling_back(connection: EngineConnection) -> None:
            remove()
            if rolled_back is not None:
                rolled_back()

        def remove() -> None:
            event.remove(self._connection, "commit", committing)
            event.remove(self._connection, "rollback", rolling_back)

        event.listen(self._connection, "commit", committing)
        event.listen(self._connection, "rollback", rolling_back)

    @property
    def settled(self) -> bool:
        return not _active(self._transaction)


class _SessionTransaction(Borrowed):
    def __init__(self, session: Session, schema: str) -> None:
        super().__init__(schema)
        self._session = session
        self._connection = session.connection()
        _check_dialect(self._connection)
        self._transaction = session.get_transaction()

    def run(self, statement: Statement, /, **parameters: Any) -> Sequence[Any]:
        return _run_on_engine(self._session.connection(), statement.render(self._schema), parameters)

    def after_commit(self, call: Callable[[], None], rolled_back: Callable[[], None] | None = None) -> None:
        pending = self._session.info.setdefault(PENDING, [])
        if not pending:
            event.listen(self._session, "after_commit", _session_committed)
            event.listen(self._session, "after_rollback", _session_rolled_back)
        pending.append((call, rolled_back))

    @property
    def settled(self) -> bool:
        return self._session.get_transaction() is not self._transaction


def _session_committed(session: Session) -> None:
    if session.in_nested_transaction():  # a savepoint was released; the outermost commit is still to come
        return
    for call, _ in _take_pending(session):
        call()


def _session_rolled_back(session: Session) -> None:
    if session.in_nested_transaction():
        return
    for _, rolled_back in _take_pending(session):
        if rolled_back is not None:
            rolled_back()


def _take_pending(session: Session) -> list[tuple[Callable[[], None], Callable[[], None] | None]]:
    event.remove(session, "after_commit", _session_committed)
    event.remove(session, "after_rollback", _session_rolled_back)
    taken: list[tuple[Callable[[], None], Callable[[], None] | None]] = session.info.pop(PENDING, [])
    return taken


class _PsycopgTransaction(Borrowed):
    knows_commit = False

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        super().__init__(schema)
        self._connection = connection
        self._cursor = psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)
        self.autocommit = connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE

    def run(self, statement: Statement, /, **parameters: Any) -> Sequence[Any]:
        self._cursor.execute(statement.render(self._schema), parameters or None)
        return rows(self._cursor)

    def after_commit(self, call: Callable[[], None], rolled_back: Callable[[], None] | None = None) -> None:
        if self.autocommit:
            call()

    @property
    def settled(self) -> bool:
        return self._connection.closed or self._connection.info.transaction_status == TransactionStatus.IDLE


class _DjangoTransaction(Borrowed):
    def __init__(self, connection: Any, schema: str) -> None:
        super().__init__(schema)
        if connection.vendor != "postgresql":
            raise TypeError(f"transaction= needs a Django connection to PostgreSQL, not to {connection.vendor}.")
        self._connection = connection

    def run(self, statement: Statement, /, **parameters: Any) -> Sequence[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement.render(self._schema), parameters or None)
            return rows(cursor)

    def after_commit(self, call: Callable[[], None], rolled_back: Callable[[], None] | None = None) -> None:
        self._connection.on_commit(call)  # Django forgets it at a rollback, and calls at once in autocommit

    @property
    def settled(self) -> bool:
        return not self._connection.in_atomic_block


def _check_dialect(connection: EngineConnection) -> None:
    dialect = connection.dialect
    if dialect.name != "postgresql" or dialect.paramstyle != "pyformat":
        raise TypeError(
            f"transaction= needs SQLAlchemy with PostgreSQL through psycopg or psycopg2, not {dialect.name}+"
            f"{dialect.driver}."
        )


def _run_on_engine(connection: EngineConnection, text: str, parameters: dict[str, Any]) -> Sequence[Any]:
    result = connection.exec_driver_sql(text, parameters or None)
    return rows(_Fetched(result)) if result.returns_rows else []


class _Fetched:
    """A SQLAlchemy result seen as a DBAPI cursor."""

    def __init__(self, result: Any) -> None:
        self.description = [(name,) for name in result.keys()]  # noqa: SIM118
        self._result = result

    def fetchall(self) -> Sequence[Any]:
        fetched: Sequence[Any] = self._result.fetchall()
        return fetched


def _active(transaction: Any) -> bool:
    return bool(transaction is not None and transaction.is_active)


def _when(over: Callable[[], bool], call: Callable[[], None], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not over() and time.monotonic() < deadline:
        time.sleep(0.002)
    if over():
        call()
