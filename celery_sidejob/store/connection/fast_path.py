"""Statements that each task runs, sent by libpq alone: a cursor takes four times the processor time for them.

Only for our own connections, and for parameters of a few plain types.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg import pq
from psycopg.adapt import Transformer

from ..statement import Statement, row_type
from .bounded import BoundedConnection

POLL_MS = 1000
"""The most milliseconds of one wait; signals end it sooner."""
BOUNDED_POLL_MS = 100
"""The most milliseconds of one wait if the answer has a deadline."""

_DONE = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)


class Exchange:
    """Sends one statement at a time over a connection, and receives its rows.

    From its `connection.prepare_threshold`th run on a statement is prepared, if that is not None.
    """

    def __init__(self, connection: BoundedConnection, schema: str) -> None:
        self._connection = connection
        self._loader = Transformer(connection)
        self._pgconn = connection.pgconn
        self._schema = schema
        self._encode = _encoders(connection.info.encoding)
        self._encoding = connection.info.encoding
        self._runs: dict[Statement, int] = {}
        self._prepared: dict[Statement, bytes] = {}
        self._tries = 0
        self._row_makers: dict[Statement, Callable[[Sequence[Any]], Any]] = {}
        self.owes = False
        """Whether the answer to a posted statement is still unread."""
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)

    def run(self, statement: Statement, parameters: Mapping[str, Any]) -> list[Any]:
        """Run a statement and return its rows as named tuples."""
        self._hand_over(statement, parameters)
        return self._rows(statement)

    def _hand_over(self, statement: Statement, parameters: Mapping[str, Any]) -> None:
        """Send a complete statement: the server runs it even if this process dies."""
        text, names = statement.positional(self._schema)
        values = [parameters[name] for name in names]
        encoded = [value if value is None else self._encode[type(value)](value) for value in values]
        formats = [pq.Format.BINARY if type(value) is bytes else pq.Format.TEXT for value in values]
        self._send(statement, text, encoded, formats)
        self._flush()

    def post(self, statement: Statement, parameters: Mapping[str, Any]) -> None:
        """Hand over a complete statement without reading its answer: call `settle` before anything else is sent."""
        self._hand_over(statement, parameters)
        self.owes = True

    def settle(self) -> None:
        """Read the answer to the posted statement; the answer may be an error, or the connection may be lost."""
        if self.owes:
            with suppress(psycopg.Error):
                self._answer()  # if a time limit strikes here, the answer is still owed
            self.owes = False

    def _send(self, statement: Statement, text: bytes, encoded: list[bytes | None], formats: list[pq.Format]) -> None:
        runs = self._runs.get(statement, 0)
        prepare_after = self._connection.prepare_threshold
        if prepare_after is None or runs < prepare_after:
            self._runs[statement] = runs + 1
            self._pgconn.send_query_params(text, encoded, None, formats)
            return
        name = self._prepared.get(statement)
        if name is None:
            # Each try has its own name: a time limit may strike after the server has prepared the statement and before
            # we have noted it.
            self._tries += 1
            name = b"sidejob_%d" % self._tries
            self._pgconn.send_prepare(name, text)
            self._flush()
            self._answer()
            self._prepared[statement] = name  # a failed statement is not prepared
        self._pgconn.send_query_prepared(name, encoded, formats)

    def command(self, text: str) -> None:
        """Run a command without parameters and rows, such as COMMIT; several commands are one message."""
        self._pgconn.send_query(text.encode())
        self._flush()
        self._answer()

    def _rows(self, statement: Statement) -> list[Any]:
        """Wait for the answer to the statement that was sent, and return its rows."""
        result = self._answer()
        count = result.ntuples
        if not count:
            return []
        make = self._row_makers.get(statement)
        if make is None:
            names = tuple((result.fname(column) or b"").decode() for column in range(result.nfields))
            make = self._row_makers[statement] = row_type(names)._make
        self._loader.set_pgresult(result)
        return self._loader.load_rows(0, count, make)

    def _wait(self) -> list[tuple[int, int]]:
        ready = self._poll.poll(POLL_MS if self._connection.deadline is None else BOUNDED_POLL_MS)
        if not ready:
            self._connection.hang_up_if_late()
        return ready

    def _flush(self) -> None:
        """Return once the system has the whole statement; meanwhile read the server's messages, or both would wait."""
        self._connection.begin_to_wait()
        pgconn = self._pgconn
        while pgconn.flush():
            self._poll.modify(pgconn.socket, select.POLLIN | select.POLLOUT)
            try:
                ready = self._wait()
            finally:
                self._poll.modify(pgconn.socket, select.POLLIN)
            if any(event & ~select.POLLOUT for _, event in ready):
                pgconn.consume_input()

    def _answer(self) -> pq.abc.PGresult:
        """Wait for the answer to the statement that was sent; raise psycopg's error if the answer is an error."""
        self._connection.begin_to_wait()
        answer = None
        try:
            while (result := self._result()) is not None:
                if answer is None or answer.status in _DONE:
                    answer = result
        except psycopg.OperationalError:  # a server that ends a session sends the reason, and hangs up
            if answer is None or answer.status in _DONE:
                raise
        if answer is None:
            raise psycopg.OperationalError("the connection is lost")
        if answer.status not in _DONE:
            raise pg.error_from_result(answer, self._encoding)
        return answer

    def _result(self) -> pq.abc.PGresult | None:
        """Wait for the next part of the answer; None at its end."""
        while self._pgconn.is_busy():
            if self._wait():
                self._pgconn.consume_input()
        return self._pgconn.get_result()


class _Encoders(dict[type, Callable[[Any], bytes]]):
    """Encoders of values by type; a subclass, such as an enumeration of texts, is encoded as its base type."""

    def __missing__(self, kind: type) -> Callable[[Any], bytes]:
        encode = self[kind] = next(self[above] for above in kind.__mro__ if above in self)
        return encode


def _encoders(encoding: str) -> Mapping[type, Callable[[Any], bytes]]:
    def text(value: str) -> bytes:
        data = str.encode(value, encoding)
        if b"\0" in data:  # libpq would end the text at the NUL
            raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
        return data

    def array(values: list[Any]) -> bytes:
        return text("{" + ",".join(_element(value) for value in values) + "}")

    return _Encoders(
        {
            list: array,
            str: text,
            bytes: bytes,
            bool: lambda value: b"t" if value else b"f",
            int: lambda value: b"%d" % value,
            float: lambda value: float.__repr__(value).encode(),
            datetime: lambda value: value.isoformat().encode(),
        }
    )


def _element(value: Any) -> str:
    """Return an element in the form of an array's text."""
    if value is None:
        return "NULL"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    return f'"{value.isoformat()}"' if isinstance(value, datetime) else str(value)
