"""The caller's own open transaction: SQLAlchemy, psycopg or Django. Only used, never owned.

We never wrap it in an engine, commit it, roll it back or reconfigure it. Statements run on it as if the caller had
written them. The statements of one call run inside a savepoint: after an error of ours the transaction is as it was
before. Work that must follow the caller's commit is handed to `after_commit`. It must lead to the store's own database.

Where psycopg's is asynchronous, our statements are awaited in the caller's event loop. They are written for synchronous
connections, so they run in a greenlet, out of which each one is awaited, as SQLAlchemy's own synchronous half does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from ...model.errors import InvalidValueError, MissingLibraryError
from ..errors import ATTEMPTS, LockHeld, Moved, in_the_way, locked_out
from ..statement import Reader, Statement, Transaction, row_type, rows

SAVEPOINT = "celery_sidejob"

FOREIGN_KEY_VIOLATION = "23503"
"""Postgres' error code for a reference to a row that was deleted before the referring row was written."""
LOCK_NOT_AVAILABLE = "55P03"
"""Postgres' error code for a wait for a lock that exceeded lock_timeout."""
SERIALIZATION_FAILURE = "40001"
"""Postgres' error code in a REPEATABLE READ transaction for a row that was written elsewhere since it began."""

T = TypeVar("T")


class Borrowed(Transaction):
    """An executor over a transaction of the caller's."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self.is_broker = False
        """Whether the store is Celery's broker as well."""

    def run(self, statement: Statement, /, **parameters: Any) -> Sequence[Any]:
        """Run one statement in the caller's transaction and return its rows."""
        with _explained():
            statement = statement.in_broker if self.is_broker else statement
            return self._execute(statement.render(self._schema), parameters or None)

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Make the block's writes all or nothing: by a savepoint, or in autocommit by a transaction.

        The caller sees the block's own error even if rolling back fails because of it, for example on a broken
        connection.
        """
        alone = self.autocommit
        with _explained():
            self._execute("BEGIN ISOLATION LEVEL READ COMMITTED" if alone else f"SAVEPOINT {SAVEPOINT}")
        try:
            yield
        except BaseException as error:
            # If this fails, the connection and its transaction are gone. The block's own error says more, and perhaps
            # ends this process.
            with suppress(Exception):
                if alone:
                    self._execute("ROLLBACK")
                else:
                    self._execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
                    self._execute(f"RELEASE SAVEPOINT {SAVEPOINT}")
            if isinstance(error, LockHeld):
                raise locked_out("transaction=", error.holder(self)) from error
            raise
        self._execute("COMMIT" if alone else f"RELEASE SAVEPOINT {SAVEPOINT}")

    def apply(self, work: Callable[[], T]) -> T:
        """Make the writes of `work` all or nothing, and return its result.

        `work` is repeated if a row that it had read without a lock was changed or deleted before it wrote.
        """
        for _ in range(ATTEMPTS):
            try:
                with self.atomic():
                    return work()
            except Exception as error:
                if not isinstance(error, Moved) and code_of(error) != FOREIGN_KEY_VIOLATION:
                    raise
                last = error
        raise in_the_way("transaction=", last) from last

    @property
    def autocommit(self) -> bool:
        """Whether there is no transaction to join: each statement is committed by itself."""
        raise NotImplementedError

    @property
    def never_commits(self) -> bool:
        """Whether it is the transaction around a test, which is always rolled back."""
        return False

    def after_commit(self, call: Callable[[], None]) -> None:
        """Have `call` called once after the outermost commit, at once in autocommit; never after a rollback.

        If `tells_of_commits` is false, it is never called: the sweeper does the work that must follow.
        """
        raise NotImplementedError

    @property
    def tells_of_commits(self) -> bool:
        """Whether `after_commit` calls anything."""
        return True

    def watch_commit(self) -> Callable[[], bool]:
        """Return a function that tells whether the caller got an answer to a commit that is known to have happened."""
        return lambda: not self.has_broken

    @property
    def has_broken(self) -> bool:
        """Whether the connection broke since it was lent: its caller then cannot know whether a commit happened."""
        raise NotImplementedError

    def roll_back(self) -> None:
        """Roll the caller's transaction back: only if a run has left it open, holding the lock on its job."""
        raise NotImplementedError

    def _execute(self, text: str, parameters: dict[str, Any] | None = None) -> Sequence[Any]:
        raise NotImplementedError

    @property
    def address(self) -> Address | None:
        """The address of the connection's server and database, as far as the driver knows it."""
        info = getattr(self._driver(), "info", None)
        try:
            return (info.host, info.port, info.dbname) if info is not None else None
        except Exception:  # closed, or unknown to the driver: then the database is asked every time
            return None

    def _driver(self) -> Any:
        """Return the driver's own connection."""
        raise NotImplementedError


_UNFIT = {
    "25P02": "was aborted by an error before: nothing more can be done in it, so roll it back.",
    "25006": "only reads, and a job or a message has to be written: give one that may write.",
}
"""The reason why nothing can be written in a transaction, by Postgres' error code."""


@contextmanager
def _explained() -> Iterator[None]:
    """Explain errors of a transaction in which nothing can be written."""
    try:
        yield
    except Exception as error:
        why = _UNFIT.get(code_of(error))
        if why is None:
            raise
        raise InvalidValueError(f"The transaction in transaction= {why}") from error


def code_of(error: Exception) -> str:
    """Return Postgres' code for an error of the caller's driver, or an empty text."""
    driver = getattr(error, "orig", None) or error.__cause__ or error  # of SQLAlchemy, of Django, or the driver's own
    return getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None) or ""


Address = tuple[str, int, str]
"""Host, port and database."""


def broke(driver: Any) -> bool:
    """Tell whether a connection of psycopg or psycopg2 broke, rather than was closed."""
    return bool(driver.broken if hasattr(driver, "broken") else driver.closed > 1)


_TRANSACTION_OPEN = Statement("SELECT txid_status(%(id)s::bigint) = 'in progress' AS open")


def is_open(executor: Reader, transaction: int) -> bool:
    """Tell whether a transaction is still open."""
    return bool(executor.run(_TRANSACTION_OPEN, id=transaction)[0].open)


_TROUBLE = ("08", "53", "58", "57P01", "57P02", "57P03", "57P05")
"""The prefixes of Postgres' codes for these: the connection failed, resources are used up, the system failed; the
server ends, has crashed, begins, or has ended an idle session."""

_INVALIDATED = "8s2b"
"""SQLAlchemy's code for using a connection that it has lost in a transaction."""

_DRIVERS = frozenset({"psycopg", "psycopg2"})
_BELONGS_TO = {"psycopg": "connection", "sqlalchemy": "engine", "django": "db"}
"""By library: the attribute by which a cursor or a connection refers to its connection or engine."""


def is_trouble(error: BaseException) -> bool:
    """Tell whether the server or the network caused an error of psycopg, or of SQLAlchemy or Django over it.

    If Postgres refuses a statement, the caller caused the error: a constraint, a deadlock, a lock, the caller's
    timeout.
    """
    return any(_is_trouble(one) for one in _behind(error))


def comes_from(error: BaseException, owners: Sequence[Any]) -> bool:
    """Tell whether an error was raised by one of these connections, sessions or engines, or by their cursors.

    Drivers do not say so in their errors, but the objects are in the frames through which the error came.
    """
    wanted = {id(owner) for owner in owners if owner is not None}
    for one in _behind(error):
        for frame, _ in walk_tb(one.__traceback__):
            if any(id(found) in wanted for local in frame.f_locals.values() for found in _used_by(local)):
                return True
    return False


def _used_by(local: Any) -> Iterator[Any]:
    """Yield an object and, if it belongs to a database library, its connection or engine."""
    yield local
    name = _BELONGS_TO.get(type(local).__module__.partition(".")[0])
    if name is not None:
        yield getattr(local, name, None)


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and the errors from which it was raised or during whose handling it was raised."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, None if one.__suppress_context__ else one.__context__]


def _is_trouble(error: BaseException) -> bool:
    # SQLAlchemy's own flag, for any driver, and its error for later use of that connection.
    if getattr(error, "connection_invalidated", False) or getattr(error, "code", None) == _INVALIDATED:
        return True
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if not code:  # the server sent no code: the connection is lost, or was lost before
        return any((driver, "OperationalError") in kinds for driver in _DRIVERS) or (
            ("psycopg2", "InterfaceError") in kinds and "connection already closed" in str(error)
        )
    return any((driver, "Error") in kinds for driver in _DRIVERS) and str(code).startswith(_TROUBLE)


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
    """A transaction of psycopg's AsyncConnection, for work that `spawn` does."""

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
    """Psycopg's AsyncConnection, for work that `spawn` does."""

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
