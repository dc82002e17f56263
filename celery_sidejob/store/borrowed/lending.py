"""Borrows the caller's transaction, of any supported library, if it leads to the store's own database."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import psycopg

from ...model.errors import SchemaError
from ..meta import Database, cluster, look
from .borrowed import Awaited, AwaitedTransaction, Borrowed, PsycopgTransaction, greenlets, is_trouble

T = TypeVar("T")


def borrow(transaction: Any, schema: str) -> Borrowed:
    """Return an executor over the caller's transaction; TypeError for any other object."""
    return transaction if isinstance(transaction, Borrowed) else _adapt(transaction, schema)


def owners(transaction: Any) -> tuple[Any, ...]:
    """Return the objects through which the statements of the caller's transaction pass, without touching it."""
    if isinstance(transaction, Awaited):
        return (transaction.connection,)
    found = (library.owners(transaction) for library in _libraries())
    return next((owners for owners in found if owners is not None), (transaction,))


def check(borrowed: Borrowed, schema: str, own: Callable[[], Database]) -> None:
    """Refuse a transaction of another database than the store's `own`, before any statement can abort it."""
    found = look(borrowed, schema)
    if found is None:
        raise SchemaError(
            f"transaction= leads to a database without the schema {schema!r}. It must be the database of "
            "sidejob_database_url, so that your rows and the job can commit together."
        )
    ours = own()
    if ours.cluster is not None and found.is_same_as(ours):
        try:
            with borrowed.atomic():
                found = replace(found, cluster=cluster(borrowed))
        except Exception as error:
            if is_trouble(error):
                raise
            # The role may not read it: then the checks below must suffice.
    if not found.is_same_as(ours):
        raise SchemaError(
            f"transaction= leads to the database {found.name!r}, which has a schema {schema!r} of its own but is not "
            f"the database {ours.name!r} of sidejob_database_url. It must be, so that your rows and the job can commit "
            "together."
        )


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


async def spawn(work: Callable[[], T]) -> T:
    """Do synchronous work in which the statements of an asynchronous transaction are awaited."""
    done: T = await greenlets().greenlet_spawn(work)
    return done


def _adapt(transaction: Any, schema: str) -> Borrowed:
    if isinstance(transaction, Awaited):
        return AwaitedTransaction(transaction.connection, schema)
    if isinstance(transaction, psycopg.Connection):
        return PsycopgTransaction(transaction, schema)
    adapted = (library.adapt(transaction, schema) for library in _libraries())
    borrowed: Borrowed | None = next((one for one in adapted if one is not None), None)
    if borrowed is None:
        raise _refused(transaction)
    return borrowed


def _refused(transaction: Any) -> TypeError:
    name, module = type(transaction).__name__, type(transaction).__module__
    if module.startswith("sqlalchemy.ext.asyncio") or isinstance(transaction, psycopg.AsyncConnection):
        return TypeError(
            f"transaction= cannot be {name}, which is asynchronous, in a call that is not awaited: await it, as in "
            "`await task.aenqueue(..., transaction=session)` or `await job.aio.run(transaction=session)`."
        )
    if module.startswith("asyncpg"):
        return TypeError(
            "transaction= cannot be a connection of asyncpg: give SQLAlchemy's AsyncSession or AsyncConnection on "
            "psycopg (postgresql+psycopg://), or psycopg's AsyncConnection, in an awaited call."
        )
    return TypeError(
        "transaction= takes a SQLAlchemy Connection or Session, a psycopg Connection, or a Django connection or its "
        f"alias, not {name}."
    )


def _libraries() -> Iterator[Any]:
    """Yield our module for each library that this process has imported: no other library can own a transaction."""
    if "sqlalchemy" in sys.modules:
        from . import of_sqlalchemy

        yield of_sqlalchemy
    if "django.db" in sys.modules:
        from . import of_django

        yield of_django
