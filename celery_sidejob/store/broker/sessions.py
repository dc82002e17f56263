"""What is set for a whole session of the broker's, on a connection that no proxy shares among clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from psycopg import sql

from ..connection.own_executor import OwnExecutor

# Tables of messages are empty now and full a moment later. A plan that was made for an empty one reads it as a whole.
# To a table that has to be read as a whole all the same, Postgres before version 18 then gives an absurd cost, and
# compiles the statement for a quarter of a second each time.
_BY_INDEX = "SET enable_seqscan = off; SET plan_cache_mode = force_generic_plan; SET jit = off"


def plan_by_index(executor: OwnExecutor) -> None:
    """Have Postgres use indexes however few rows there are."""
    executor.connection.execute(_BY_INDEX)


def commit_late(executor: OwnExecutor) -> None:
    """Have commits answer before they are on the server's disk."""
    executor.connection.execute("SET synchronous_commit = off")


def commit_lastingly(executor: OwnExecutor) -> None:
    """Have the transaction that was begun commit as without `commit_late`."""
    executor.connection.execute("SET LOCAL synchronous_commit TO DEFAULT")


def listen(executor: OwnExecutor, channel: str, hear: Callable[[str], None]) -> None:
    """Hear what is said on a channel of NOTIFY: at each statement of this session, and in `heard`."""
    executor.connection.add_notify_handler(lambda notify: hear(notify.payload))
    executor.connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))


def heard(executor: OwnExecutor) -> Iterator[str]:
    """Yield what has arrived since; raises the connection's error if the server has hung up."""
    pgconn = executor.connection.pgconn
    pgconn.consume_input()
    while (notify := pgconn.notifies()) is not None:
        yield notify.extra.decode()
