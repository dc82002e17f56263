"""The caller's own open transaction if it is SQLAlchemy's; imported only if it may be one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import psycopg
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from ..statement import row_type
from .borrowed import Borrowed

PENDING = "celery_sidejob_after_commit"
AFTER_COMMIT = "sidejob-after-commit"
"""The name of the threads that do the work that follows the commit of an engine's connection."""


def adapt(transaction: Any, schema: str) -> Borrowed | None:
    """Return an executor over an object of SQLAlchemy, None for anything else."""
    if isinstance(transaction, scoped_session):
        transaction = transaction()
    if isinstance(transaction, Session):
        return _SQLAlchemyTransaction(transaction, transaction.connection, schema)
    if isinstance(transaction, Connection):
        return _SQLAlchemyTransaction(transaction, lambda: transaction, schema)
    return None


def owners(transaction: Any) -> tuple[Any, ...] | None:
    """Return the session or connection and its engine, whose connections all lead to one database."""
    if isinstance(transaction, scoped_session):
        transaction = transaction()
    if isinstance(transaction, Session):
        with suppress(SQLAlchemyError):  # the session has several engines
            return transaction, getattr(transaction.get_bind(), "engine", None)
        return (transaction,)
    return (transaction, transaction.engine) if isinstance(transaction, Connection) else None


class _SQLAlchemyTransaction(Borrowed):
    """A transaction that a connection or a session (`owner`) commits; `connection` returns its present connection."""

    def __init__(self, owner: Connection | Session, connection: Callable[[], Connection], schema: str) -> None:
        super().__init__(schema)
        self._owner = owner
        self._connection = connection
        _check_dialect(connection())
        self._lent = self._driver()
        engine = connection().engine
        if engine.pool not in _pools:
            _pools.add(engine.pool)
            event.listen(engine.pool, "invalidate", _connection_broke)
            event.listen(engine, "handle_error", _commit_failed)

    @property
    def autocommit(self) -> bool:
        return bool(getattr(self._driver(), "autocommit", False))

    def after_commit(self, call: Callable[[], None]) -> None:
        if self.autocommit:
            call()
        elif isinstance(self._owner, Session):
            _follow_session(self._owner, self._connection(), call)
        else:
            _follow_connection(self._owner, call)

    @property
    def has_broken(self) -> bool:
        return self._lent in _broken

    def roll_back(self) -> None:
        if isinstance(self._lent, psycopg.AsyncConnection):  # nothing can be awaited where a run ends
            self._lent.pgconn.exec_(b"ROLLBACK")
        else:
            self._owner.rollback()

    def _driver(self) -> Any:
        return self._connection().connection.driver_connection  # an asynchronous connection too, as the caller sees it

    def _execute(self, text: str, parameters: dict[str, Any] | None = None) -> Sequence[Any]:
        # If the caller streams results, our statement would become a server-side cursor, which cannot write.
        result = self._connection().exec_driver_sql(text, parameters, execution_options={"stream_results": False})
        return [*map(row_type(tuple(result.keys()))._make, result.fetchall())] if result.returns_rows else []


_pools: WeakSet[Any] = WeakSet()
"""Pools of lent connections: each reports when one of its connections breaks, just before closing it."""
_broken: WeakSet[Any] = WeakSet()
"""The driver's connections that broke."""


def _connection_broke(connection: Any, *_: Any) -> None:
    _broken.add(getattr(connection, "driver_connection", connection))  # in an adapter if it is asynchronous


class _Pending:
    """The work that follows the commit of a lent connection, except the work of savepoints that were rolled back.

    SQLAlchemy does not name a savepoint when it makes it. But each savepoint has a parent, and its rollback returns
    there.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.before: threading.Thread | None = None
        """The thread that does the work that follows the previous commit."""
        self.savepoints: list[tuple[Any, int]] = []
        """For each savepoint: its parent, and the number of calls made before it."""
        self.leads_back = False
        """Whether a savepoint is about to be rolled back, or was."""

    def settle(self, connection: Connection) -> None:
        """Forget the calls of savepoints that were rolled back in the meantime."""
        if self.leads_back:
            self.leads_back, now = False, connection.get_nested_transaction()
            made = [place for place, (parent, _) in enumerate(self.savepoints) if parent is now]
            # An unknown savepoint was made before we began to listen, and so before all calls.
            place, count = (made[-1], self.savepoints[made[-1]][1]) if made else (0, 0)
            del self.calls[count:], self.savepoints[place:]


_connections: WeakKeyDictionary[Connection, _Pending] = WeakKeyDictionary()
"""The work that follows the commits of lent connections; we listen to the connections as long as they exist."""
_failed: WeakSet[Any] = WeakSet()
"""Transactions of lent connections whose commit raised an error."""


def _follow_connection(connection: Connection, call: Callable[[], None]) -> None:
    if connection not in _connections:
        event.listen(connection, "commit", _connection_commits)
        event.listen(connection, "rollback", _connection_rolled_back)
        event.listen(connection, "savepoint", _savepoint_made)
        event.listen(connection, "rollback_savepoint", _savepoint_rolled_back)
        event.listen(connection, "release_savepoint", _savepoint_released)
    _pending(connection).calls.append(call)


def _pending(connection: Connection) -> _Pending:
    pending = _connections.setdefault(connection, _Pending())
    pending.settle(connection)
    return pending


def _connection_commits(connection: Connection) -> None:
    # SQLAlchemy reports a connection's commit just before it is sent. The work therefore waits, in its own thread,
    # until the transaction is over. If the process dies in between, the sweeper finds the rows.
    pending = _pending(connection)
    following = _connections[connection] = _Pending()
    following.before = pending.before
    if pending.calls:
        work = connection.get_transaction(), pending.calls, pending.before
        following.before = threading.Thread(target=_when_committed, args=work, name=AFTER_COMMIT, daemon=True)
        following.before.start()


def _commit_failed(context: Any) -> None:
    connection = context.connection
    if context.statement is None and connection is not None and connection in _connections:
        transaction = connection.get_transaction()
        if transaction is not None:
            _failed.add(transaction)


def _connection_rolled_back(connection: Connection) -> None:
    before = _pending(connection).before
    _connections[connection] = _Pending()
    _connections[connection].before = before


def _savepoint_made(connection: Connection, _: Any) -> None:
    pending = _pending(connection)
    pending.savepoints.append((connection.get_nested_transaction(), len(pending.calls)))


def _savepoint_rolled_back(connection: Connection, *_: Any) -> None:
    _pending(connection).leads_back = True


def _savepoint_released(connection: Connection, *_: Any) -> None:
    _pending(connection)


def _follow_session(session: Session, connection: Connection, call: Callable[[], None]) -> None:
    if PENDING not in session.info:
        event.listen(session, "after_commit", _session_committed)
        event.listen(session, "after_transaction_end", _session_transaction_ended)
        event.listen(session, "after_soft_rollback", _session_savepoint_rolled_back)
    session.info.setdefault(PENDING, []).append((call, connection, _savepoints(session)))


def _savepoints(session: Session) -> list[SessionTransaction]:
    """Return the session's open savepoints, the innermost first."""
    found, transaction = [], session.get_nested_transaction()
    while transaction is not None:
        if transaction.nested:
            found.append(transaction)
        transaction = transaction.parent
    return found


def _session_committed(session: Session) -> None:
    if session.in_nested_transaction():  # a savepoint was released; the outermost commit is still to come
        return
    calls, session.info[PENDING] = session.info.get(PENDING, []), []
    for call, connection, _ in calls:
        if connection.in_transaction():  # the session had joined it: its commit or rollback is still to come
            _follow_connection(connection, call)
        else:
            call()


def _session_transaction_ended(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:  # work not done by now was rolled back, or the session was closed
        session.info[PENDING] = []


def _session_savepoint_rolled_back(session: Session, transaction: SessionTransaction) -> None:
    if transaction.nested:
        session.info[PENDING] = [each for each in session.info.get(PENDING, []) if transaction not in each[2]]


def _check_dialect(connection: Connection) -> None:
    dialect = connection.dialect
    if dialect.name != "postgresql" or dialect.paramstyle != "pyformat":
        raise TypeError(
            f"transaction= needs SQLAlchemy with PostgreSQL through psycopg or psycopg2, not {dialect.name}+"
            f"{dialect.driver}: make the engine with postgresql+psycopg://."
        )


def _when_committed(
    transaction: Any, calls: Sequence[Callable[[], None]], before: threading.Thread | None, timeout_s: float = 60.0
) -> None:
    def is_over() -> bool:
        return transaction is None or not transaction.is_active

    if before is not None:  # the work follows the commits of a connection in their order
        before.join(timeout_s)
    deadline = time.monotonic() + timeout_s
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.002)
    if is_over() and transaction not in _failed:
        for call in calls:
            call()
