"""The caller's own open transaction: SQLAlchemy, psycopg or Django. Only used, never owned.

It is never wrapped in an engine, committed, rolled back or reconfigured. Statements run on it as if the caller had
written them, those of one call inside a savepoint, so that an error of ours leaves the transaction as it was; what must
follow its commit is handed to `after_commit`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from ..model.errors import InvalidValueError, SchemaError
from .errors import ATTEMPTS, Moved, in_the_way
from .identity import Database, cluster, look
from .statement import Reader, Statement, Transaction, rows

SAVEPOINT = "celery_sidejob"

FOREIGN_KEY_VIOLATION = "23503"
"""Postgres' code for a row that went before another was written that refers to it."""

T = TypeVar("T")


class Borrowed(Transaction):
    """An executor over a transaction of the caller's."""

    def __init__(self, schema: str) -> None:
        self._schema = schema

    def run(self, statement: Statement, /, **parameters: Any) -> Sequence[Any]:
        """Run one statement in the caller's transaction and return its rows."""
        with _explained():
            return self._execute(statement.render(self._schema), parameters or None)

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Have all that the block writes be there or nothing of it: a savepoint; in autocommit, a transaction.

        The caller is told of the block's own error also where going back fails for it: a connection that broke.
        """
        alone = self.autocommit
        with _explained():
            self._execute("BEGIN" if alone else f"SAVEPOINT {SAVEPOINT}")
        try:
            yield
        except BaseException:
            # Where this fails the connection is gone, and its transaction with it; what the block raised says more, and
            # is perhaps the end of this process.
            with suppress(Exception):
                if alone:
                    self._execute("ROLLBACK")
                else:
                    self._execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
                    self._execute(f"RELEASE SAVEPOINT {SAVEPOINT}")
            raise
        self._execute("COMMIT" if alone else f"RELEASE SAVEPOINT {SAVEPOINT}")

    def apply(self, work: Callable[[], T]) -> T:
        """Have all that `work` writes be there or nothing of it, and return what it returns.

        It is done again when a row that it had read without a lock changed, or went, before it wrote.
        """
        for _ in range(ATTEMPTS):
            try:
                with self.atomic():
                    return work()
            except Exception as error:
                if not isinstance(error, Moved) and _code(error) != FOREIGN_KEY_VIOLATION:
                    raise
                last = error
        raise in_the_way("transaction=", last) from last

    @property
    def autocommit(self) -> bool:
        """Whether there is no transaction to belong to: each statement is committed by itself."""
        raise NotImplementedError

    def after_commit(self, call: Callable[[], None]) -> None:
        """Have `call` called once after the outermost commit, at once in autocommit; never after a rollback.

        Where `tells_of_commits` is false nothing is called: the sweeper does what must follow.
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
        """Whether the connection broke since it was lent, so that its caller cannot know what became of a commit."""
        raise NotImplementedError

    def roll_back(self) -> None:
        """Roll the caller's transaction back: only for one that a run has left open, holding the lock on its job."""
        raise NotImplementedError

    def _execute(self, text: str, parameters: dict[str, Any] | None = None) -> Sequence[Any]:
        raise NotImplementedError

    @property
    def address(self) -> Address | None:
        """Where the connection leads, as far as its driver tells."""
        info = getattr(self._driver(), "info", None)
        try:
            return (info.host, info.port, info.dbname) if info is not None else None
        except Exception:  # closed, or a driver that does not tell: then it is asked every time
            return None

    def _driver(self) -> Any:
        """Return the driver's own connection."""
        raise NotImplementedError


_UNFIT = {
    "25P02": "was aborted by an error before: roll it back, there is no more to be done with it.",
    "25006": "only reads, and a job or a message has to be written: give one that may write.",
}
"""Why nothing can be written in a transaction, by Postgres' code."""


@contextmanager
def _explained() -> Iterator[None]:
    """Say what is wrong with a transaction in which nothing can be written."""
    try:
        yield
    except Exception as error:
        why = _UNFIT.get(_code(error))
        if why is None:
            raise
        raise InvalidValueError(f"The transaction in transaction= {why}") from error


def _code(error: Exception) -> str:
    """Return Postgres' code for an error of the caller's driver, or nothing."""
    driver = getattr(error, "orig", None) or error.__cause__ or error  # SQLAlchemy's, Django's, its own
    return getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None) or ""


Address = tuple[str, int, str]
"""Host, port and database."""


def borrow(transaction: Any, schema: str) -> Borrowed:
    """Return an executor over the caller's transaction; TypeError for anything that is not one."""
    return transaction if isinstance(transaction, Borrowed) else _adapt(transaction, schema)


def owners(transaction: Any) -> tuple[Any, ...]:
    """Return the objects through which statements of the caller's transaction go, without touching it."""
    if "sqlalchemy" in sys.modules:
        from . import borrowed_sqlalchemy

        if (found := borrowed_sqlalchemy.owners(transaction)) is not None:
            return found
    alias = transaction if isinstance(transaction, str) else getattr(transaction, "alias", None)
    if alias is not None and "django.db" in sys.modules:
        return (transaction, _django_connection(alias))
    return (transaction,)


def check(borrowed: Borrowed, schema: str, own: Callable[[], Database]) -> None:
    """Refuse a transaction of another database than the store's `own`, before any statement can spoil it."""
    found = look(borrowed, schema)
    if found is None:
        raise SchemaError(
            f"transaction= leads to a database without the schema {schema!r}. It must be the database of "
            "sidejob_database_url, so that your rows and the job can commit together."
        )
    ours = own()
    if ours.cluster is not None and found.is_same_as(ours):
        with suppress(Exception), borrowed.atomic():  # it may not be asked: then the rest must do
            found = replace(found, cluster=cluster(borrowed))
    if not found.is_same_as(ours):
        raise SchemaError(
            f"transaction= leads to the database {found.name!r}, which has a schema {schema!r} of its own but is not "
            f"the database {ours.name!r} of sidejob_database_url. It must be, so that your rows and the job can commit "
            "together."
        )


def _adapt(transaction: Any, schema: str) -> Borrowed:
    if isinstance(transaction, psycopg.Connection):
        return _PsycopgTransaction(transaction, schema)
    if "sqlalchemy" in sys.modules:  # who has none of its objects need not wait for its import
        from .borrowed_sqlalchemy import adapt

        if (adapted := adapt(transaction, schema)) is not None:
            return adapted
    if "django.db" in sys.modules:
        from django.db.backends.base.base import BaseDatabaseWrapper
        from django.utils.connection import ConnectionProxy

        if isinstance(transaction, str):
            return _DjangoTransaction(_django_connection(transaction), schema)
        if isinstance(transaction, ConnectionProxy | BaseDatabaseWrapper):
            return _DjangoTransaction(transaction, schema)
    raise TypeError(
        "transaction= takes a SQLAlchemy Connection or Session, a psycopg Connection, or a Django connection or its "
        f"alias (not asynchronous ones), not {type(transaction).__name__}."
    )


def _django_connection(alias: str) -> Any:
    from django.core.exceptions import ImproperlyConfigured
    from django.db import connections
    from django.utils.connection import ConnectionDoesNotExist

    try:
        return connections[alias]
    except (ConnectionDoesNotExist, ImproperlyConfigured) as error:
        raise TypeError(f"transaction={alias!r} names no connection of Django's DATABASES: {error}") from error


class _PsycopgTransaction(Borrowed):
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
        self._cursor.execute(text, parameters, prepare=False)  # the caller's prepared statements are the caller's
        return rows(self._cursor)


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
        if self._connection.in_atomic_block:  # entered by hand and never left: Django has no other way out of it
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


def broke(driver: Any) -> bool:
    """Tell whether a connection of psycopg or psycopg2 broke, instead of being closed."""
    broken: bool = driver.broken if hasattr(driver, "broken") else driver.closed > 1
    return broken


_TRANSACTION_ID = Statement("SELECT txid_current() AS id")
_TRANSACTION_OPEN = Statement("SELECT txid_status(%(id)s::bigint) = 'in progress' AS open")


def transaction_id(borrowed: Borrowed) -> int:
    """Return by which number Postgres knows the caller's transaction."""
    found: int = borrowed.run(_TRANSACTION_ID)[0].id
    return found


def is_open(executor: Reader, transaction: int) -> bool:
    """Tell whether a transaction is neither committed nor rolled back yet."""
    return bool(executor.run(_TRANSACTION_OPEN, id=transaction)[0].open)
