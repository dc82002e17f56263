"""Tells whether an error of the caller's own connection is due to the server or the network, or to the caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from traceback import walk_tb
from typing import Any

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
