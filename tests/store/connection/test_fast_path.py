"""Statements without a cursor: the same values, rows and errors as with one."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg

from celery_sidejob.store.connection.bounded import BoundedConnection
from celery_sidejob.store.connection.fast_path import Exchange
from celery_sidejob.store.errors import Overdue
from celery_sidejob.store.statement import Statement
from tests.tools.waiting import wait_until

PREPARE_AFTER = 2
NOW = datetime(2026, 11, 22, 1, 2, 3, 456789, tzinfo=UTC)
VALUES: list[tuple[str, Any]] = [
    ("text", 'a "quoted" \\ text, {with} 100 % of ünïcode'), ("text", ""), ("text", None), ("bytea", b"\0\\x\xff"),
    ("bytea", b""), ("int", -7), ("bigint", 2**40), ("float8", 0.1), ("boolean", True), ("boolean", False),
    ("timestamptz", NOW), ("text[]", ['"', "\\", "", "NULL", "a,b", "{}"]), ("text[]", []), ("text[]", [None, "x"]),
    ("bytea[]", [b"", b"\0\xff\\", None]), ("int[]", [1, -2]), ("timestamptz[]", [NOW, None]),
]  # fmt: skip


@pytest.fixture
def connection(database_url: str) -> Iterator[BoundedConnection]:
    with BoundedConnection.connect(database_url, autocommit=True, prepare_threshold=None) as made:
        made.execute("SET timezone TO 'UTC'")
        yield made


@pytest.fixture(params=[None, PREPARE_AFTER], ids=["not prepared", "prepared"])
def exchange(connection: BoundedConnection, request: pytest.FixtureRequest) -> Exchange:
    connection.prepare_threshold = request.param
    return Exchange(connection, "sidejob")


@pytest.mark.parametrize(("kind", "value"), VALUES)
def test_values_arrive_and_come_back(exchange: Exchange, kind: str, value: Any) -> None:
    statement = Statement(f"SELECT %(value)s::{kind} AS value, %(value)s::{kind} IS NULL AS none, 5 %% 3 AS rest")

    for _ in range(PREPARE_AFTER + 2):
        (row,) = exchange.run(statement, {"value": value})
        assert (row.value, row.none, row.rest) == (value, value is None, 2)


class Colour(StrEnum):
    RED = "red"


class Weight(IntEnum):
    HEAVY = 9


class Share(float):
    def __repr__(self) -> str:
        return f"Share({float(self)})"


@pytest.mark.parametrize(("kind", "value"), [("text", Colour.RED), ("int", Weight.HEAVY), ("float8", Share(0.5))])
def test_a_value_of_a_subclass_arrives_as_what_it_derives_from(exchange: Exchange, kind: str, value: Any) -> None:
    statement = Statement(f"SELECT %(value)s::{kind} AS value")

    assert exchange.run(statement, {"value": value})[0].value == value


@pytest.mark.parametrize("rows", [0, 1, 2, 1000])
def test_all_rows_arrive_in_order(exchange: Exchange, rows: int) -> None:
    statement = Statement("SELECT n, 'r' || n AS name FROM generate_series(1, %(rows)s::int) AS n ORDER BY n")

    for _ in range(PREPARE_AFTER + 2):
        found = exchange.run(statement, {"rows": rows})
        assert [(row.n, row.name) for row in found] == [(n, f"r{n}") for n in range(1, rows + 1)]


def test_a_large_value_arrives_whole(exchange: Exchange) -> None:
    large = "0123456789" * 2_000_000

    (row,) = exchange.run(Statement("SELECT length(%(value)s::text) AS length"), {"value": large})

    assert row.length == len(large)


def test_it_prepares_only_where_it_may(connection: BoundedConnection) -> None:
    statement = Statement("SELECT %(value)s::int AS value")
    for prepare_after, names in ((None, 0), (PREPARE_AFTER, 1)):
        connection.prepare_threshold = prepare_after
        exchange = Exchange(connection, "sidejob")
        for _ in range(PREPARE_AFTER + 1):
            exchange.run(statement, {"value": 1})
        assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (names,)


def test_errors_are_psycopg_s_and_leave_the_connection_in_use(exchange: Exchange) -> None:
    with pytest.raises(pg.DivisionByZero, match="division by zero"):
        exchange.run(Statement("SELECT 1 / %(value)s::int"), {"value": 0})
    for value in ("a\0b", ["a\0b"]):
        with pytest.raises(psycopg.DataError, match="NUL"):
            exchange.run(Statement("SELECT %(value)s"), {"value": value})
    assert exchange.run(Statement("SELECT 1 AS one"), {})[0].one == 1


def test_an_answer_that_is_read_later_disturbs_nobody(exchange: Exchange) -> None:
    divide = Statement("SELECT 1 / %(value)s::int AS value")
    for value in (1, 0) * (PREPARE_AFTER + 1):
        exchange.post(divide, {"value": value})
        assert exchange.owes
        exchange.settle()
        assert not exchange.owes
        assert exchange.run(Statement("SELECT 2 AS value"), {})[0].value == 2


def test_an_answer_whose_reading_was_interrupted_is_read_again(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit strikes before the whole answer was read."""
    exchange.post(Statement("SELECT 1 AS value"), {})
    result = exchange._result

    def strike() -> Any:
        result()
        monkeypatch.setattr(exchange, "_result", result)
        raise TimeoutError

    monkeypatch.setattr(exchange, "_result", strike)
    with pytest.raises(TimeoutError):
        exchange.settle()

    exchange.settle()
    assert exchange.run(Statement("SELECT 2 AS value"), {})[0].value == 2


@pytest.mark.parametrize("by", ["exchange", "cursor"])
def test_a_server_that_does_not_answer_in_time_is_hung_up_on(
    connection: BoundedConnection, exchange: Exchange, by: str
) -> None:
    connection.deadline = time.monotonic() + 60
    assert exchange.run(Statement("SELECT 1 AS one"), {})[0].one == 1

    connection.deadline = began = time.monotonic()
    sleep = {
        "exchange": lambda: exchange.run(Statement("SELECT pg_sleep(30)"), {}),
        "cursor": lambda: connection.execute("SELECT pg_sleep(30)"),
    }
    with pytest.raises(Overdue):
        sleep[by]()
    assert (connection.broken, time.monotonic() - began < 10) == (True, True)


def test_a_server_that_hangs_up_is_an_operational_error(connection: BoundedConnection, exchange: Exchange) -> None:
    with pytest.raises(psycopg.OperationalError):
        exchange.run(Statement("SELECT pg_terminate_backend(pg_backend_pid())"), {})
    assert connection.broken


def test_why_a_server_has_ended_a_session_is_the_error(connection: BoundedConnection, exchange: Exchange) -> None:
    # Not sooner: with the answer to this, libpq would take the error for a notice.
    exchange.command("BEGIN; SET LOCAL idle_in_transaction_session_timeout = 300")
    wait_until(lambda: select.select([connection.fileno()], [], [], 0)[0], message="the server to hang up")

    with pytest.raises(pg.IdleInTransactionSessionTimeout):
        exchange.command("COMMIT")
    assert connection.broken


def test_a_preparation_that_was_interrupted_spoils_nothing(
    connection: BoundedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit strikes when the server has prepared the statement and its answer was read."""
    connection.prepare_threshold = 0
    exchange = Exchange(connection, "sidejob")
    statement = Statement("SELECT 1 AS one")
    answer = exchange._answer

    def strike() -> Any:
        answer()
        monkeypatch.setattr(exchange, "_answer", answer)
        raise TimeoutError

    monkeypatch.setattr(exchange, "_answer", strike)
    with pytest.raises(TimeoutError):
        exchange.run(statement, {})

    assert [exchange.run(statement, {})[0].one for _ in range(3)] == [1, 1, 1]
