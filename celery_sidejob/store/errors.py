"""Errors that the store raises itself, and our errors for those of Postgres."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors as pg

from ..model.errors import SchemaError, SideJobError, StoreUnavailableError
from .statement import Reader

FAILURES = (psycopg.Error, SideJobError)
"""Errors that a transaction may raise because of the store; a time limit that strikes during it is none of them."""

UPGRADE = "Run `celery -A <app> sidejob db upgrade`."


class Overdue(psycopg.OperationalError):
    """The deadline has passed, or the server is silent."""


class StoreDown(StoreUnavailableError):
    """The store does not answer, or accepts no writes. Other causes, such as a locked row, are answers of the store."""


class OutcomeUnknown(StoreDown):
    """The connection broke while a commit was on its way: it may have been applied."""


class LacksRights(SchemaError):
    """The user lacks a right that is needed in the schema."""


class NoAnswer(OutcomeUnknown):
    """The store took a statement and has not answered within the given time."""


class RowsLocked(StoreUnavailableError):
    """A row has been locked for longer than this process may wait: nothing was changed."""


class LockHeld(Exception):
    """Another session holds an advisory lock for longer than this session may wait; `holder` names that session."""

    def __init__(self, holder: Callable[[Reader], str]) -> None:
        super().__init__()
        self.holder = holder


class Moved(Exception):
    """Data that a transaction had read before it took its locks has changed: repeat the whole transaction."""


ATTEMPTS = 5
"""How often a transaction is tried if other transactions interfere."""


def in_the_way(name: str, error: BaseException) -> StoreUnavailableError:
    """Return the error after the last attempt."""
    return StoreUnavailableError(
        f"{name!r} was begun {ATTEMPTS} times, and others were in the way each time ({first_line(error)}). Nothing was "
        "changed; try again."
    )


def locked_out(name: str, holder: str) -> RowsLocked:
    """Return the error to raise for a lock that another session holds."""
    return RowsLocked(
        f"{name!r} needs a lock that {holder} holds. Nothing was changed; try again, or end that session by "
        "pg_terminate_backend()."
    )


REFUSED = (pg.InsufficientPrivilege, pg.LockNotAvailable, pg.UndefinedTable, pg.InvalidSchemaName, pg.UndefinedColumn)
"""Postgres' codes for refused statements: a right or a table is missing, or a row is locked. Nothing was changed."""


def will_be_refused_again(error: BaseException) -> bool:
    """Tell whether Postgres, or its driver, refuses what a statement is to write, as it will the next time."""
    passing = (psycopg.OperationalError, psycopg.InterfaceError)
    return isinstance(error, psycopg.Error | UnicodeError) and not isinstance(error, passing)


def refusal(error: psycopg.Error, name: str, *, schema: str, setting: str) -> SchemaError | StoreUnavailableError:
    """Return our error for a refused statement; `setting` names the setting of the URL."""
    if isinstance(error, pg.InsufficientPrivilege):
        return LacksRights(
            f"The user in {setting} lacks a right that {name!r} needs in schema {schema!r} "
            f"({first_line(error)}). Workers and clients need what "
            "`celery -A <app> sidejob db grants <user>` prints; an upgrade is run by the schema's owner."
        )
    if isinstance(error, pg.LockNotAvailable):
        return RowsLocked(
            f"A row or table that {name!r} needs has been locked for too long ({first_line(error)}). Nothing was "
            "changed; try again."
        )
    return SchemaError(f"Schema {schema!r} is missing or incomplete ({first_line(error)}). {UPGRADE}")


@contextmanager
def unavailable_during(name: str) -> Iterator[None]:
    """Raise StoreUnavailableError if a connection ends in the block, which runs statements outside of `transact`."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise StoreDown(f"The store failed during {name!r}: {first_line(error)}") from error


def unknown(error: BaseException, when: str) -> OutcomeUnknown:
    """Return the error for a commit that was on its way; `when` describes the commit."""
    if isinstance(error, Overdue):
        return NoAnswer(f"The store did not answer in time {when}: it may or may not have been applied.")
    return OutcomeUnknown(f"The connection broke {when}: it may or may not have been applied.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
