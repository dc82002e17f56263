"""One SQL statement, written once, rendered once per schema, run by any executor."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import namedtuple
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_TABLE = re.compile(r"\{(\w+)\}")
_PARAMETER = re.compile(r"%\((\w+)\)s")
_FUNCTION = re.compile(
    r"(?<![\w.])(?<!\bAS )(?<!\bRECURSIVE )(?!(?:coalesce|extract|greatest|least|nullif)\()"
    r"(?!unnest\((?:[^(),]|\([^()]*\))*,)(?=[a-z]\w*\()"
)
"""Where the name of a function begins.

Syntax that looks like a function does not match: an unnest of several arrays, or an alias with columns. SQL's own words
are in capitals here.
"""
_CATALOG = re.compile(r"(?:(?<=\bFROM )|(?<=\bJOIN ))(?=pg_\w+\b(?![.(]))")
_IN_BROKER = re.compile(r"/\*!(.*?)\*/", re.DOTALL)
_KEY = re.compile(r"(->>?'\w+')(?!::)")
"""The key of a JSON value: without a type, Postgres would take the key for JSON if there were an operator for that."""


class Statement:
    """SQL text in which `{jobs}` stands for the table `jobs` of our schema and `%(id)s` for a parameter.

    Names are always schema-qualified, because a session's search_path belongs to the user or to a pooling proxy. A role
    that may create objects in a schema on that path could replace Postgres' own functions. Tables are qualified by
    their braces; for functions this class puts `pg_catalog` before each. Operators are written to match their types
    exactly.

    The text between ``/*!`` and ``*/`` is run only if the store is Celery's broker as well: then the transaction that
    changes a row also puts a reference to it into a queue (`outbox/references.py`).
    """

    __slots__ = ("_positional", "_rendered", "in_broker", "text")
    frequent = False
    """Whether it is a `Frequent` one."""

    def __init__(self, text: str) -> None:
        apart = _IN_BROKER.sub("", text)
        self.in_broker = self if apart == text else type(self)(_IN_BROKER.sub(r"\1", text))
        """The statement in the form for a store that is the broker."""
        text = apart
        text = _CATALOG.sub("pg_catalog.", _FUNCTION.sub("pg_catalog.", text.strip()))
        self.text = _KEY.sub(r"\1::text", text)
        self._rendered: dict[str, str] = {}
        self._positional: dict[str, tuple[bytes, tuple[str, ...]]] = {}

    def render(self, schema: str) -> str:
        """Return the text for one schema; the text is made once, so that drivers can recognise it."""
        try:
            return self._rendered[schema]
        except KeyError:
            return self._rendered.setdefault(schema, _TABLE.sub(rf'"{schema}".\1', self.text))

    def positional(self, schema: str) -> tuple[bytes, tuple[str, ...]]:
        """Return the text with $1, $2, ... for the server itself, and the parameter for each."""
        try:
            return self._positional[schema]
        except KeyError:
            names = tuple(dict.fromkeys(_PARAMETER.findall(self.text)))
            text = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", self.render(schema))
            return self._positional.setdefault(schema, (text.replace("%%", "%").encode(), names))


class Frequent(Statement):
    """A statement that runs without a cursor where possible (`fast_path.py`)."""

    __slots__ = ()
    frequent = True


class Reader(Protocol):
    """Runs statements that only read: in an open transaction, or each in its own."""

    @abstractmethod
    def run(self, statement: Statement, /, **parameters: Any) -> Sequence[Any]:
        """Run one statement and return its rows as named tuples (none for a statement without a result)."""


class Transaction(Reader):
    """An open transaction, ours or one borrowed from the user: its writes take effect when it is committed.

    A function with this parameter does not know the rest of the transaction, and is never repeated alone.
    """


class Autocommit(Reader):
    """Runs each statement as its own transaction, and once more if the answer to the first try is lost.

    A function with this parameter may therefore be applied twice, and must tolerate that.
    """


def rows(cursor: Any) -> list[Any]:
    """Return the rows of a DBAPI cursor as named tuples, whatever row factory its owner has set."""
    if cursor.description is None:
        return []
    row = row_type(tuple(column[0] for column in cursor.description))
    return [row(**record) if isinstance(record, dict) else row(*record) for record in cursor.fetchall()]


@lru_cache(maxsize=512)
def row_type(names: tuple[str, ...]) -> Any:
    """Return the class of a named tuple."""
    return namedtuple("Row", names)


def columns(rows: Collection[Sequence[Any]], *names: str) -> dict[str, list[Any]]:
    """Return the columns of rows, as arrays for an `unnest`, by names given to them in their order."""
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def arrays(things: Collection[Any], *names: str) -> dict[str, list[Any]]:
    """Return attributes of things, as arrays for an `unnest`, by their names."""
    return {name: [getattr(thing, name) for thing in things] for name in names}


def first(rows: Sequence[Any]) -> Any | None:
    """Return the first row; None if there is none."""
    return rows[0] if rows else None


def first_value(rows: Sequence[Any], kind: Callable[[Any], T]) -> T | None:
    """Return the first column of the first row, as this type; None if there is no row."""
    return kind(rows[0][0]) if rows else None


def picked(row: Any, *names: str) -> dict[str, Any]:
    """Return these columns of a row, or attributes of anything, by name."""
    return {name: getattr(row, name) for name in names}


def violated(error: BaseException) -> str | None:
    """Return the name of the violated constraint, from the driver's own error or a wrapped one."""
    for found in (error, getattr(error, "orig", None), error.__cause__):
        name: str | None = getattr(getattr(found, "diag", None), "constraint_name", None)
        if name is not None:
            return name
    return None
