"""An executor over one of our own connections: for single statements, for transactions, or beside other work.

Lent to calls that Celery makes while it is open (`OwnTransaction`), or not in use (`Idle`).

Our statements need some settings in a session, whatever defaults its server, its database or its role has. Without a
proxy in between, our session is set up once. Behind a proxy that pools transactions nothing may be set for a session,
because other clients get it next. There each transaction has its own settings, and a single statement becomes a
transaction, but only if the defaults would change the meaning of a statement.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg import sql
from psycopg.pq import ConnStatus, TransactionStatus

from ...model import crash_points, native
from ...model.crash_points import AnswerLost
from ..borrowed.borrowed import PsycopgTransaction
from ..errors import StoreDown, first_line, unknown
from ..statement import Reader, Statement, Transaction, rows
from .bounded import BoundedConnection
from .fast_path import Exchange
from .turns import LONGEST_TURN_S

MEANING = {
    "default_transaction_isolation": "read committed",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "quote_all_identifiers": "off",
    "row_security": "on",
    "session_replication_role": "origin",
    "exit_on_error": "off",
}
"""The settings that change the result of a statement. A value fits if it begins with the value here."""

COMFORT = {
    "timezone": "UTC",
    "search_path": "pg_catalog, pg_temp",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
}
"""The settings that change no result, because statements name every schema and times have their offset."""

NEEDED = MEANING | COMFORT

_LOOK = Statement("""
SELECT pg_backend_pid() AS pid, ARRAY(
  SELECT n.name FROM unnest(%(names)s::text[], %(values)s::text[]) AS n(name, value)
  WHERE NOT starts_with(current_setting(n.name, true), n.value)) AS others""")


def read_settings(executor: Reader) -> tuple[int, Sequence[str]]:
    """Return the process that serves this session, and the names of the settings with another value."""
    (found,) = executor.run(_LOOK, names=list(NEEDED), values=list(NEEDED.values()))
    return found.pid, found.others


T = TypeVar("T")

PREPARE_AFTER = 5
"""A statement is prepared on a connection after it has run there this often, if preparing is allowed."""

PLANS_LIVE_S, PLANS_SERVE = 2.0, 20
"""How long, and for how many transactions, a connection keeps the plans of its prepared statements.

A plan that was made while its tables were empty reads whole tables. Postgres keeps it, however they grow, until
autovacuum has processed them: a minute in which each statement of a burst costs a hundred times its share. A rare
statement need not be planned more often than it runs.
"""

_LOCK_TIMEOUT = "; SET LOCAL lock_timeout = {}"
# A process that is stopped or cut off in the middle would otherwise keep its jobs locked, and their callers waiting.
_PAUSES = "; SET LOCAL idle_in_transaction_session_timeout = {}"
# Postgres plans statements with arrays anew each time, because they look cheaper once their values are known. To plan a
# join it reads the ends of the indexes, past all rows that vacuum has not removed there: planning took three times as
# long as execution. Their plans do not depend on values (tests/protocol/test_plans.py checks the generic ones).  The
# protocol reads again after each lock. Under another isolation level a transaction would still see the store as it was
# at its first statement.
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL plan_cache_mode = force_generic_plan"


def _quoted(value: str) -> str:
    return ", ".join(f"'{part}'" for part in value.split(", "))


class OwnExecutor(Transaction):
    """Runs statements on a connection of ours."""

    def __init__(self, connection: BoundedConnection, schema: str, *, longest_pause_s: float | None = None) -> None:
        """`longest_pause_s`: no transaction waits longer than this for its own process, nor a statement for a lock."""
        self.connection = connection
        self.used = False
        self.needs_begin = False
        """Whether a statement without BEGIN would wait for a lock for ever; otherwise it waits for `LONGEST_TURN_S`."""
        self.is_broker = False
        """Whether the store is Celery's broker as well."""
        self.pooled = False
        """Whether there is a proxy in between: see `set_up`."""
        self._pauses = ""
        if longest_pause_s is not None:
            longest_ms = round(longest_pause_s * 1000)
            self._pauses = _PAUSES.format(longest_ms) + _LOCK_TIMEOUT.format(longest_ms)
        self._begin = _BEGIN + self._pauses
        self._alone = True
        """Whether a single statement needs no transaction around it."""
        self._schema = schema
        self._cursor = connection.cursor()
        # Greenlets wait as psycopg does.
        waits_by_psycopg = native.is_patched() or native.is_eventlet()
        self._exchange = None if waits_by_psycopg else Exchange(connection, schema)
        self._hung_up: Any = None
        self._plans_end = math.inf
        self._planned_for = 0
        self._pgconn = connection.pgconn

    def set_up(self, *, prepare: bool) -> None:
        """Set the session up for our statements, and find out whether there is a proxy in between.

        There is a proxy if another process answers than the connect reported: PgBouncer and similar proxies invent the
        process ids that they report to clients. Two statements may then reach two sessions, and a session-level lock
        would stay with a session that other clients use.

        Otherwise statements that run again and again may be prepared. Each is written for one plan, and planned once
        for all its parameters. Otherwise Postgres would plan some statements each time: a claim in a managed queue
        takes 0.5 ms, and planning it 1.5 ms. Such a plan expects to read a tenth of the table, which looks worth
        compiling; our statements read a page, and compiling would take longer.
        """
        pid, others = read_settings(self)
        self.pooled = pid != self.connection.info.backend_pid
        commands = [f"SET {'LOCAL ' if self.pooled else ''}{name} = {_quoted(NEEDED[name])}" for name in others]
        if self.pooled:
            self._begin = "; ".join([_BEGIN, *commands]) + self._pauses
            self.needs_begin = bool(self._pauses)
            self._alone = MEANING.keys().isdisjoint(others)
            return
        if prepare:
            commands += ["SET plan_cache_mode = force_generic_plan", "SET jit = off"]
            self.connection.prepare_threshold = PREPARE_AFTER
            self._plans_end = time.monotonic() + PLANS_LIVE_S
        if self._pauses:
            commands.append(f"SET lock_timeout = {round(LONGEST_TURN_S * 1000)}")
        if commands:
            self._cursor.execute("; ".join(commands), prepare=False)

    def _renew_plans(self) -> None:
        """Before a transaction, have Postgres plan its next statements anew, if it is time for that."""
        self._planned_for += 1
        if self._planned_for > PLANS_SERVE and time.monotonic() >= self._plans_end:
            self._plans_end = time.monotonic() + PLANS_LIVE_S
            self._planned_for = 1
            self._cursor.execute("DISCARD PLANS", prepare=False)

    def run(self, statement: Statement, /, **parameters: Any) -> list[Any]:
        """Run one statement and return its rows."""
        statement = statement.in_broker if self.is_broker else statement
        try:
            if statement.frequent and self._exchange is not None:
                return self._exchange.run(statement, parameters)
            self._cursor.execute(statement.render(self._schema), parameters or None)
        except pg.ReadOnlySqlTransaction as error:
            self.close()  # after a failover a new connection may lead to a store that accepts writes
            raise StoreDown(f"The store takes no writes just now ({first_line(error)}).") from error
        return rows(self._cursor)

    def copy(self, table: str, columns: str, rows: Iterable[Sequence[Any]]) -> None:
        """Insert rows with COPY: all of them, or none."""
        with self._cursor.copy(Statement(f"COPY {{{table}}} ({columns}) FROM STDIN").render(self._schema)) as copy:
            for row in rows:
                copy.write_row(row)

    def post(self, statement: Statement, /, **parameters: Any) -> None:
        """Have the server run one statement without waiting for its answer: call `settle` before any other use.

        The server runs it even if this process dies, or closes the connection.
        """
        if self._exchange is None:
            self.run(statement, **parameters)
        else:
            self._exchange.post(statement, parameters)

    def settle(self) -> bool:
        """Read the answer to the posted statement, even an error; tell whether the connection can be used again."""
        if self._exchange is not None:
            self._exchange.settle()
        return not self.broken and self.rests

    def listen(self, names: Iterable[str], hear: Callable[[str, str], None]) -> None:
        """Have `hear(name, payload)` called for notifications under these names: at each statement, and in `take_in`.

        The session must not lead through a proxy.
        """
        self.connection.add_notify_handler(lambda notify: hear(notify.channel, notify.payload))
        for name in names:
            self.connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(name)))

    def take_in(self) -> None:
        """Hear the notifications since the last call; raises the connection's error if the server has hung up."""
        self._pgconn.consume_input()
        while (notify := self._pgconn.notifies()) is not None:
            assert self._pgconn.notify_handler is not None
            self._pgconn.notify_handler(notify)

    def in_transaction(
        self, name: str, work: Callable[[OwnExecutor], T], *, single: bool = False, locked_s: float | None = None
    ) -> T:
        """Run `work` between BEGIN and COMMIT, or as the `single` statement it is; roll back on any error.

        With `locked_s` no statement between them waits longer for a lock.
        """
        self._renew_plans()
        single = single and self._alone
        if not single:
            bound = "" if locked_s is None else _LOCK_TIMEOUT.format(max(1, round(locked_s * 1000)))
            self._command(self._begin + bound)
        try:
            if not single:
                result = work(self)
            if crash_points.actor is not None:
                crash_points.actor(f"{name}:before-commit")
        except AnswerLost as lost:  # the connection broke before the committing statement was sent: nothing happened
            self.close()
            raise StoreDown(str(lost)) from lost
        except BaseException:
            if not self.broken and not self.busy and not self.rests:
                self._command("ROLLBACK")
            raise
        if single:
            return self._answered(name, partial(work, self), f"during {name!r}")
        self._answered(name, lambda: self._command("COMMIT"), f"while {name!r} was being committed")
        return result

    def _command(self, text: str) -> None:
        if self._exchange is None:
            self._cursor.execute(text, prepare=False)
        else:
            self._exchange.command(text)

    def _answered(self, name: str, commit: Callable[[], T], when: str) -> T:
        """Do the commit; if the connection breaks before the answer, raise OutcomeUnknown, which says `when`."""
        try:
            result = commit()
            if crash_points.actor is not None:
                crash_points.actor(f"{name}:after-commit")
        except (psycopg.OperationalError, psycopg.InterfaceError, AnswerLost) as error:
            if isinstance(error, psycopg.Error) and not self.broken:
                raise  # Postgres answered: the transaction failed and was rolled back
            raise unknown(error, when) from error
        return result

    def dropped_within(self, timeout_s: float) -> bool:
        """Wait, and tell whether the server hung up: on an unused connection the server sends nothing else."""
        try:
            if self._hung_up is None:
                self._hung_up = native.poll()  # not select(): a process may have more than a thousand files open
                self._hung_up.register(self.connection.fileno(), select.POLLIN)
            return bool(self._hung_up.poll(timeout_s * 1000))
        except (psycopg.Error, OSError, ValueError):
            return True

    @property
    def broken(self) -> bool:
        """Whether this connection can no longer be used."""
        return self._pgconn.status == ConnStatus.BAD  # a closed connection has this status too

    @property
    def busy(self) -> bool:
        """Whether a statement is in progress: a signal handler (a time limit's) raised in the middle of it."""
        return self._pgconn.transaction_status == TransactionStatus.ACTIVE

    @property
    def rests(self) -> bool:
        """Whether no transaction is open: a transaction stays failed if even its BEGIN or ROLLBACK was cancelled."""
        return self._pgconn.transaction_status == TransactionStatus.IDLE

    def lay_down(self) -> bool:
        """End one use of the connection, with its deadline; close it and return False if it cannot be used again."""
        self.connection.deadline = None
        if self.broken or not self.rests:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close the connection; never raises."""
        # Without the cancellation the server finishes the statement for no client. Before version 17 libpq cancels with
        # a call that has no time limit and stops every thread: for minutes, if the server is silent.
        posted = self._exchange is not None and self._exchange.owes
        if not self.broken and self.busy and not posted and psycopg.capabilities.has_cancel_safe():
            with suppress(psycopg.Error):
                self.connection.cancel_safe(timeout=1.0)
        with suppress(psycopg.Error):  # it is gone either way
            self.connection.close()


class OwnTransaction(PsycopgTransaction):
    """Collects the work that follows its commit; its owner calls `committed`."""

    def __init__(self, executor: OwnExecutor, schema: str) -> None:
        super().__init__(executor.connection, schema)
        self._calls: list[Callable[[], None]] = []

    def after_commit(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    @property
    def tells_of_commits(self) -> bool:
        return True

    def committed(self) -> None:
        """Do the work that follows the commit."""
        for call in self._calls:
            call()


IDLE_S = 5.0


class Idle:
    """Keeps idle connections for the next use, and closes each once it was idle for `IDLE_S`."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """After a fork, forget the idle connections, which belong to the parent."""
        self._lock = native.lock()
        self._idle: list[tuple[float, OwnExecutor]] = []
        self._reaper: threading.Thread | None = None

    def take(self) -> OwnExecutor | None:
        """Take an idle connection, if there is one."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                executor = self._idle.pop()[1]
            if executor.broken or executor.dropped_within(0):  # Postgres was restarted, or closed an idle connection
                executor.close()
                continue
            executor.used = True
            return executor

    def give_back(self, executor: OwnExecutor) -> None:
        """Keep a connection after use, unless it cannot be used again."""
        if not executor.lay_down():
            return
        with self._lock:
            self._idle.append((time.monotonic(), executor))
            if self._reaper is not None:
                return
            self._reaper = reaper = threading.Thread(target=self._reap, name="sidejob-idle-connections", daemon=True)
        reaper.start()  # not under the lock: with gevent the start waits

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, executor in idle:
            executor.close()

    def _reap(self) -> None:
        """Close connections that were idle for `IDLE_S`; return when there are none."""
        while True:
            with self._lock:
                now = time.monotonic()
                old = [executor for since, executor in self._idle if now - since >= IDLE_S]
                self._idle = [(since, executor) for since, executor in self._idle if now - since < IDLE_S]
                if not self._idle:
                    self._reaper = None
                wait = IDLE_S - (now - self._idle[0][0]) if self._idle else None
            for executor in old:
                executor.close()
            if wait is None:
                return
            time.sleep(wait)
