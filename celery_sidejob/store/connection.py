"""Our own connections to Postgres: few, short-lived, safe across forks, with no session state.

At most one transaction per thread is open at a time and none while user code runs, so a pool child needs one
connection. A connection that was idle for `IDLE_S` is closed. A worker's services take turns on one (`take_turns`),
its heartbeat has one of its own (`Connections.over`).

Any of them may lead through a proxy that gives each transaction another session (PgBouncer in transaction mode). So
nothing is kept in a session: no SET but SET LOCAL, no temporary tables, no LISTEN, and prepared statements only where
the server that answered the connect is the one that answers statements.
"""

from __future__ import annotations

import math
import os
import re
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ConnStatus, TransactionStatus

from ..model import native
from ..model.crash_points import AnswerLost, reach
from ..model.errors import SchemaError, SettingsError, StoreUnavailableError
from ..model.settings import NO_STORE
from .borrowed import Address, Borrowed, borrow, check
from .bounded import BoundedConnection, Overdue
from .identity import Database, cluster, look
from .libpq import Exchange
from .places import Places
from .put_off import Late
from .sent import Sent
from .statement import Statement, rows

T = TypeVar("T")
L = TypeVar("L", bound=Late)

IDLE_S = 5.0
_SCHEME = re.compile(r"^postgres(ql)?(\+\w+)?://")

ATTEMPTS = 5
"""How often a transaction that Postgres itself asked to repeat (deadlock, serialization) is tried."""


REPEATED = (pg.DeadlockDetected, pg.SerializationFailure, pg.ForeignKeyViolation, pg.InvalidSqlStatementName)
"""What a transaction is repeated for; the last is a prepared statement that psycopg dropped after a rollback."""

MESSAGES_KEY = "messages_pkey"
"""What Postgres names when an INSERT ... ON CONFLICT (job_id) has not seen a message that was just being marked.

Its first look at the index may pass by a row that moves to a new version meanwhile; the second, which would begin anew,
comes after the primary key's, which raises. Seen in one of a thousand asks beside an endless loop of updates.
"""

TIMEOUTS = tuple(
    getattr(pg, name) for name in ("IdleInTransactionSessionTimeout", "TransactionTimeout") if hasattr(pg, name)
)
"""By which Postgres ends a session and says so; the second is one of Postgres 17 and may be set for a role."""

UPGRADE = "Run `celery -A <app> sidejob db upgrade`."

GREENLETS_SHARE = 10
"""How many connections the greenlets of one process use at once, however many bodies they run."""

PREPARE_AFTER = 5
"""How often a statement is run on a connection before it is prepared there, where that is allowed."""

PLANS_LIVE_S, PLANS_SERVE = 2.0, 20
"""A connection of ours keeps the plans of its prepared statements so long, and for so many transactions.

A plan that was made while its tables were empty reads them whole, and Postgres keeps it, however they grow, until
autovacuum has looked at them: a minute, in which each statement of a burst costs a hundred times its share. What
runs seldom need not be planned more often than it runs.
"""

SHORTEST_CONNECT_S = 2
"""What libpq takes for the least time in which to connect."""

LONGEST_TURN_S = 1.0
"""How long a service waits for a row that somebody has locked, before the other services have their turn."""


class OutcomeUnknown(StoreUnavailableError):
    """The connection broke while a commit was on its way: it may have been applied."""


class LacksRights(SchemaError):
    """The user may not do in the schema what is wanted."""


class NoAnswer(OutcomeUnknown):
    """The store took a statement and has not answered within the time that there was."""


class RowsLocked(StoreUnavailableError):
    """Somebody has had a row locked for longer than this process may wait: nothing was changed."""


class Moved(Exception):
    """What a transaction had read before it locked has changed: repeat it whole."""


class Connections:
    """Opens, lends and closes this process's connections to one store."""

    def __init__(
        self, url: str | None, schema: str, *, prepare: bool = True, longest_pause_s: float | None = None,
        setting: str = "sidejob_database_url",
    ) -> None:  # fmt: skip
        """`longest_pause_s`: how long a transaction of ours may wait for its own process before the server ends it.

        `setting` is where the URL comes from, for errors.
        """
        self._url = url
        self.setting = setting
        self._prepare = prepare
        self._longest_pause_s = longest_pause_s
        self.schema = schema
        self._lock = native.lock()
        self._idle: list[tuple[float, OwnExecutor]] = []
        self._reaper: threading.Thread | None = None
        self._turn = threading.RLock()
        self._of_thread = threading.local()
        self._places = Places(GREENLETS_SHARE) if native.is_patched() else None
        self._database: Database | None = None
        self._seen: set[Address] = set()
        self._pid = os.getpid()
        self._put_off: dict[str, Late] = {}
        _pools.add(self)

    def transact(
        self, name: str, work: Callable[[OwnExecutor], T], *, single: bool = False, within_s: float | None = None
    ) -> T:
        """Run `work` in one transaction of ours and return what it returns, committed.

        With `single` it is one statement, which needs no BEGIN and no COMMIT. `work` is repeated whole after a
        deadlock, when a job or a port that it had read was deleted before it wrote (a foreign key tells), or when it
        raises `Moved`, and once after a connection that had died while idle; it must not have effects outside the
        transaction. Raises `OutcomeUnknown` when the connection breaks during the commit (`NoAnswer` if the store has
        not answered `within_s`), `StoreUnavailableError` when nothing was committed.
        """
        if within_s is None:
            within_s = getattr(self._of_thread, "patience_s", None)
        with self._within(within_s) if within_s is not None else nullcontext():
            return self._in_turn(name, work, single=single)

    def _in_turn(self, name: str, work: Callable[[OwnExecutor], T], *, single: bool) -> T:
        if self._own_executor is not None:
            return self._transact(name, work, single=single, bounded=True)
        if _thread.takes_turns:
            with self._turn:
                return self._transact(name, work, single=single and name in QUICK, bounded=True)
        with self._turn if _process.shares_one else self._places.one() if self._places else nullcontext():
            return self._transact(name, work, single=single)

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """Have what this thread says to the store within the block answered by then, or given up."""
        self._of_thread.deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._of_thread.deadline = None

    def _transact(
        self, name: str, work: Callable[[OwnExecutor], T], *, single: bool = False, bounded: bool = False
    ) -> T:
        fresh = False
        for attempt in range(1, ATTEMPTS + 1):
            executor = self._acquire(fresh)
            executor.connection.deadline = self._deadline
            try:
                result = executor.in_transaction(name, work, single=single, bounded=bounded)
            except (*REPEATED, Moved) as error:
                self._release(executor)
                if attempt == ATTEMPTS:
                    raise StoreUnavailableError(
                        f"{name!r} was begun {ATTEMPTS} times, and others were in the way each time "
                        f"({_first_line(error)}). Nothing was changed; try again."
                    ) from error
            except pg.UniqueViolation as error:
                self._release(executor)
                if attempt == ATTEMPTS or error.diag.constraint_name != MESSAGES_KEY:
                    raise
            except pg.InsufficientPrivilege as error:
                self._release(executor)
                raise LacksRights(
                    f"The user in {self.setting} lacks a right that {name!r} needs in schema {self.schema!r} "
                    f"({_first_line(error)}). Workers and clients need what "
                    "`celery -A <app> sidejob db grants <user>` prints; an upgrade is run by the schema's owner."
                ) from error
            except pg.LockNotAvailable as error:
                self._release(executor)
                raise RowsLocked(
                    f"A row that {name!r} needs has been locked for too long ({_first_line(error)}). Nothing was "
                    "changed; try again."
                ) from error
            except OutcomeUnknown:
                executor.close()
                self.close()  # the idle ones have probably died with it
                raise
            except (psycopg.OperationalError, psycopg.InterfaceError, *TIMEOUTS) as error:
                broken = executor.broken
                executor.close() if broken else self._release(executor)
                if broken and executor.used and not fresh and not isinstance(error, Overdue):
                    fresh = True  # it had died while it was idle (a restart of Postgres): nothing was sent, try anew
                    continue
                raise StoreUnavailableError(f"The store failed during {name!r}: {_first_line(error)}") from error
            except (pg.UndefinedTable, pg.InvalidSchemaName, pg.UndefinedColumn) as error:
                self._release(executor)
                raise SchemaError(
                    f"Schema {self.schema!r} is missing or incomplete ({_first_line(error)}). {UPGRADE}"
                ) from error
            except BaseException:
                self._release(executor)
                raise
            else:
                self._release(executor)
                return result
        raise AssertionError("unreachable")

    def send(
        self, name: str, statement: Statement, parameters: Mapping[str, Any], *, within_s: float, held: bool
    ) -> Sent | None:
        """Send one statement as a transaction of its own, and wait for nothing; None where that cannot be done.

        Needs a connection that is there and idle, and is for threads of users' bodies. `held`: nobody else is to wait
        for it, so nobody is given the connection before `answer`, or `let_go`, which the caller then owes.
        """
        if native.is_patched() or self._own_executor is not None or _thread.takes_turns:
            return None
        with self._turn if _process.shares_one else nullcontext(), self._within(within_s):
            self._mind_fork()
            try:
                executor = self._take_idle()
            except StoreUnavailableError:
                return None
            if executor is None:
                return None
            executor.connection.deadline = self._deadline
            sent: Sent | None = None
            try:
                reach(f"{name}:before-commit")
                sent = executor.send(name, statement, parameters)
            except (psycopg.Error, AnswerLost):
                executor.close()
            finally:
                executor.connection.deadline = None
                if sent is not None and held and not _process.shares_one:
                    sent.held = executor
                else:
                    self._release(executor)
            return sent

    def answer(self, sent: Sent, *, within_s: float | None = None) -> list[Any]:
        """Wait for the answer to what was sent, and return its rows.

        Raises `OutcomeUnknown` for whatever else there was, `NoAnswer` if there was nothing `within_s`.
        """
        try:
            sent.settle(None if within_s is None else time.monotonic() + within_s)
        except Overdue as error:
            raise _unknown(error, f"during {sent.name!r}") from error
        finally:
            self.let_go(sent)
        if sent.error is not None:
            self.close()  # the idle ones have probably died with it
            raise _unknown(sent.error, f"during {sent.name!r}") from sent.error
        return sent.rows

    def let_go(self, sent: Sent) -> None:
        """Let others have the connection over which something was sent; the next one waits for its answer."""
        executor, sent.held = sent.held, None
        if executor is not None:
            self._release(executor)

    def run(self, statement: Statement, /, **parameters: Any) -> list[Any]:
        """Run one statement that may be repeated, as a transaction of its own."""
        return self.read(lambda executor: executor.run(statement, **parameters))

    def read(self, work: Callable[[OwnExecutor], T], *, within_s: float | None = None) -> T:
        """Do `work`, one statement that may be repeated; raises StoreUnavailableError if there is no answer in time.

        Never `OutcomeUnknown`: what may be repeated is as good as not done.
        """
        try:
            try:
                return self.transact(READ, work, single=True, within_s=within_s)
            except NoAnswer:
                raise
            except OutcomeUnknown:  # it had died while it was idle, or has just broken
                return self.transact(READ, work, single=True, within_s=within_s)
        except OutcomeUnknown as error:
            raise StoreUnavailableError(str(error)) from error

    @contextmanager
    def over(self, executor: OwnExecutor) -> Iterator[None]:
        """Have this thread's transactions go over a connection of its own within the block, and over no other."""
        self._of_thread.executor = executor
        try:
            yield
        finally:
            self._of_thread.executor = None

    @contextmanager
    def answering(self, *, within_s: float | None) -> Iterator[None]:
        """Have each of this thread's transactions within the block answered so soon, or given up, as `transact` has.

        None: none is given up, whatever was said around the block.
        """
        before = getattr(self._of_thread, "patience_s", None)
        self._of_thread.patience_s = within_s
        try:
            yield
        finally:
            self._of_thread.patience_s = before

    def put_off(self, name: str, make: Callable[[], L]) -> L:
        """Return what this process puts off writing into this store, of one kind; it is made at the first use."""
        found = self._put_off.get(name)
        return cast("L", found if found is not None else self._put_off.setdefault(name, make()))

    def if_put_off(self, name: str) -> Late | None:
        """Return the same, if this process has ever put off anything of the kind."""
        return self._put_off.get(name)

    def write_put_off(self) -> None:
        """Write all that was put off."""
        for put_off in list(self._put_off.values()):
            put_off.write_now()

    def borrow(self, transaction: Any) -> Borrowed:
        """Return an executor over a transaction of the caller's, which must lead to this store's database.

        That is looked at once for each place to which such connections lead.
        """
        borrowed = borrow(transaction, self.schema)
        address = borrowed.address
        if address is None or address not in self._seen:
            check(borrowed, self.schema, self._own_database)
            if address is not None:
                self._seen.add(address)
        return borrowed

    @property
    def _own_executor(self) -> OwnExecutor | None:
        return getattr(self._of_thread, "executor", None)

    @property
    def _deadline(self) -> float | None:
        return getattr(self._of_thread, "deadline", None)

    def _own_database(self) -> Database:
        """Tell which database our own connections lead to."""
        if self._database is None:
            own = self.transact(READ, lambda executor: look(executor, self.schema))
            if own is None:
                raise SchemaError(f"Schema {self.schema!r} is missing. {UPGRADE}")
            with suppress(psycopg.errors.InsufficientPrivilege):
                own = replace(own, cluster=self.transact(READ, cluster, single=True))
            self._database = own
        return self._database

    def close(self) -> None:
        """Close what is idle; what is lent out is closed when it comes back idle for too long."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, executor in idle:
            executor.close()

    def connect(self) -> OwnExecutor:
        """Open a connection that is not lent to anyone else: for threads with a connection of their own."""
        if self._url is None:
            raise SettingsError(NO_STORE)
        executor = None
        parameters = connection_parameters(self._url, setting=self.setting)
        deadline = self._deadline
        if deadline is not None:
            left_s = max(SHORTEST_CONNECT_S, round(deadline - time.monotonic()))
            parameters["connect_timeout"] = str(min(left_s, int(parameters["connect_timeout"])))
        try:
            connection = BoundedConnection.connect(**parameters, autocommit=True, prepare_threshold=None)
            _open_connections.add(connection)
            connection.deadline = deadline
            executor = OwnExecutor(connection, self.schema, longest_pause_s=self._longest_pause_s)
            if self._prepare and not executor.pooled:
                executor.allow_prepared()
        except psycopg.OperationalError as error:
            if executor is not None:
                executor.close()
            raise StoreUnavailableError(
                f"Cannot connect to the store: {_first_line(error)}. Is Postgres up, and is {self.setting} right?"
            ) from error
        return executor

    def _acquire(self, fresh: bool) -> OwnExecutor:
        self._mind_fork()
        own = self._own_executor
        if own is not None:
            if own.broken:  # its owner opens another, in time
                raise StoreUnavailableError("This thread's connection to the store is gone.")
            return own
        found = None if fresh else self._take_idle()
        return found if found is not None else self.connect()

    def _take_idle(self) -> OwnExecutor | None:
        """Take a connection that nobody uses, if there is one; whose answer was not waited for has it by then.

        Raises StoreUnavailableError if that answer is not there at the deadline.
        """
        while True:
            with self._lock:
                if not self._idle:
                    return None
                free = (place for place in reversed(range(len(self._idle))) if self._idle[place][1].owes is None)
                executor = self._idle.pop(next(free, -1))[1]
            try:
                executor.settle(self._deadline)
            except BaseException as error:
                self._release(executor)
                if isinstance(error, Overdue):
                    raise StoreUnavailableError(
                        "The store has not answered in time what it was sent before."
                    ) from error
                raise
            if executor.broken or executor.dropped_within(0):  # Postgres was restarted, or hung up on an idle one
                executor.close()
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise StoreUnavailableError("The store has not answered in time what it was sent before.")
                continue
            executor.used = True
            return executor

    def _release(self, executor: OwnExecutor) -> None:
        if executor.owes is None:  # else the deadline is that of whoever waits for the answer
            executor.connection.deadline = None
        if executor.broken or (executor.owes is None and not executor.rests):
            executor.close()
            return
        if executor is self._own_executor:
            return
        with self._lock:
            self._idle.append((time.monotonic(), executor))
            if self._reaper is not None:
                return
            self._reaper = reaper = threading.Thread(target=self._reap, name="sidejob-idle-connections", daemon=True)
        reaper.start()  # not under the lock: with gevent the start waits

    def _reap(self) -> None:
        """Close connections idle for `IDLE_S`; end when none is left."""
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

    def _mind_fork(self) -> None:
        if self._pid != os.getpid():
            self._forget()

    def _forget(self) -> None:
        """After a fork: the parent's connections are the parent's. Their sockets were detached by `_after_fork`."""
        self._lock = native.lock()
        self._idle = []
        self._reaper = None
        self._turn = threading.RLock()
        self._of_thread = threading.local()
        self._pid = os.getpid()
        for put_off in self._put_off.values():
            put_off.forget()


READ = "read"
"""The name of a transaction that is one statement which may be repeated."""

QUICK = frozenset({READ, "lease", "mark"})
"""Transactions of one statement that waits for no row which anybody has locked for long."""


class _Thread(threading.local):
    takes_turns = False


_thread = _Thread()


class _Process:
    shares_one = False


_process = _Process()


def share_one() -> None:
    """Have all threads of this process, and of none that it forks, take turns on one connection to each store."""
    _process.shares_one = True


def take_turns() -> None:
    """Have this thread's transactions wait for those of all others that called this: they need one connection.

    In a turn nobody waits longer than `LONGEST_TURN_S` for a row: then StoreUnavailableError tells to try again.
    """
    _thread.takes_turns = True


_BACKEND = Statement("SELECT pg_backend_pid() AS pid")
_BOUNDED = f"; SET LOCAL lock_timeout = {round(LONGEST_TURN_S * 1000)}"
# A process that is stopped or cut off in the middle would else keep its jobs locked, and all who ask them waiting.
_PAUSES = "; SET LOCAL idle_in_transaction_session_timeout = {}"
# Statements with arrays look cheaper to Postgres with the values known, and it plans them anew each time; to plan a
# join it looks at the ends of the indexes, past whatever vacuum has not removed there: that took three times as long as
# to execute them. Their plans do not depend on values (tests/protocol/test_plans.py looks at the generic ones).
_PLANNED_ONCE = "BEGIN; SET LOCAL plan_cache_mode = force_generic_plan"


class OwnExecutor:
    """Runs statements on a connection of ours."""

    def __init__(self, connection: BoundedConnection, schema: str, *, longest_pause_s: float | None = None) -> None:
        self.connection = connection
        self.used = False
        self._begin = _PLANNED_ONCE
        if longest_pause_s is not None:
            self._begin += _PAUSES.format(round(longest_pause_s * 1000))
        self._schema = schema
        self._cursor = connection.cursor()
        self._exchange: Exchange | None = None
        self._hung_up: Any = None
        self._plans_end = math.inf
        self._planned_for = 0
        self._pgconn = connection.pgconn
        self.owes: Sent | None = None
        """What was sent over this connection and has not been answered yet."""
        self.is_given_up = False
        """It was to be closed while a thread waited for an answer: that thread closes it."""

    def allow_prepared(self) -> None:
        """Have statements prepared that are run again and again: no proxy stands between."""
        self.connection.prepare_threshold = PREPARE_AFTER
        self._plans_end = time.monotonic() + PLANS_LIVE_S

    def _renew_plans(self) -> None:
        """Before a transaction: have Postgres plan anew what it next executes, if it is time."""
        self._planned_for += 1
        if self._planned_for > PLANS_SERVE and time.monotonic() >= self._plans_end:
            self._plans_end = time.monotonic() + PLANS_LIVE_S
            self._planned_for = 1
            self._cursor.execute("DISCARD PLANS", prepare=False)

    def run(self, statement: Statement, /, **parameters: Any) -> list[Any]:
        """Run one statement and return its rows."""
        try:
            if statement.frequent and not native.is_patched():  # greenlets wait as psycopg knows to
                return self._exchanging().run(statement, parameters)
            self._cursor.execute(statement.render(self._schema), parameters or None)
        except pg.ReadOnlySqlTransaction as error:
            raise self._takes_no_writes(error) from error
        return rows(self._cursor)

    def run_beside(self, work: Callable[[], object], statement: Statement, /, **parameters: Any) -> list[Any]:
        """Run one statement and return its rows; do `work`, which takes no time of others', while the server does."""
        if native.is_patched():
            work()
            return self.run(statement, **parameters)
        exchange = self._exchanging()
        exchange.send(statement, parameters)
        try:
            work()
        finally:
            try:
                found = exchange.receive()
            except pg.ReadOnlySqlTransaction as error:
                raise self._takes_no_writes(error) from error
        return found

    def _takes_no_writes(self, error: pg.Error) -> StoreUnavailableError:
        self.close()  # after a failover another connection may lead to a store that takes them
        return StoreUnavailableError(f"The store takes no writes just now ({_first_line(error)}).")

    def send(self, name: str, statement: Statement, parameters: Mapping[str, Any]) -> Sent:
        """Send one statement, of which `settle` receives the answer."""
        self._renew_plans()
        self._exchanging().send(statement, parameters)
        self.owes = sent = Sent(name, self)
        return sent

    def receive(self) -> list[Any]:
        """Wait for the answer to what was sent."""
        return self._exchanging().receive()

    def settle(self, deadline: float | None) -> None:
        """Wait for the answer that is still owed, which is whoever's has sent it."""
        owed = self.owes
        if owed is not None:
            owed.settle(deadline)

    def _exchanging(self) -> Exchange:
        if self._exchange is None:
            prepare_after = self.connection.prepare_threshold
            self._exchange = Exchange(self.connection, self._schema, prepare_after=prepare_after)
        return self._exchange

    def in_transaction(
        self, name: str, work: Callable[[OwnExecutor], T], *, single: bool = False, bounded: bool = False
    ) -> T:
        """Run `work` between BEGIN and COMMIT, or as the `single` statement it is; roll back on any error.

        With `bounded` no statement waits longer than `LONGEST_TURN_S` for a lock.
        """
        self._renew_plans()
        if single:
            return self._as_one_statement(name, work)
        begin = self._begin + _BOUNDED if bounded else self._begin
        self._cursor.execute(begin, prepare=False)
        try:
            result = work(self)
            reach(f"{name}:before-commit")
        except AnswerLost as lost:  # the connection broke before the commit was sent: nothing happened
            self.close()
            raise StoreUnavailableError(str(lost)) from lost
        except BaseException:
            if not self.broken and not self.busy:
                self._cursor.execute("ROLLBACK")
            raise
        try:
            self._cursor.execute("COMMIT")
            reach(f"{name}:after-commit")
        except (psycopg.OperationalError, psycopg.InterfaceError, AnswerLost) as error:
            if isinstance(error, psycopg.Error) and not self.broken:
                raise  # Postgres answered: the commit failed and was rolled back
            raise _unknown(error, f"while {name!r} was being committed") from error
        return result

    def _as_one_statement(self, name: str, work: Callable[[OwnExecutor], T]) -> T:
        try:
            reach(f"{name}:before-commit")
        except AnswerLost as lost:
            self.close()
            raise StoreUnavailableError(str(lost)) from lost
        try:
            result = work(self)
            reach(f"{name}:after-commit")
        except (psycopg.OperationalError, psycopg.InterfaceError, AnswerLost) as error:
            if isinstance(error, psycopg.Error) and not self.broken:
                raise  # Postgres answered: it failed
            raise _unknown(error, f"during {name!r}") from error
        return result

    @property
    def pooled(self) -> bool:
        """Whether a proxy stands between: the process that answers is not the one that the connect was told of.

        PgBouncer and its like make up the numbers that they tell their clients. Then two statements may meet two
        sessions, and a lock taken for the session's life would be left with a session that is anybody's.
        """
        return bool(self.run(_BACKEND)[0].pid != self.connection.info.backend_pid)

    def dropped_within(self, timeout_s: float) -> bool:
        """Wait, and tell whether the server hung up: nothing else is ever said on a connection that only waits."""
        try:
            if self._hung_up is None:
                self._hung_up = native.poll()  # not select(): a process may have more than a thousand files open
                self._hung_up.register(self.connection.fileno(), select.POLLIN)
            return bool(self._hung_up.poll(timeout_s * 1000))
        except (psycopg.Error, OSError, ValueError):
            return True

    @property
    def broken(self) -> bool:
        """Tell whether this connection can no longer be used."""
        return self._pgconn.status == ConnStatus.BAD  # which a closed one has too

    @property
    def busy(self) -> bool:
        """Tell whether a statement is under way: a signal's handler raised in the middle of it, as time limits do."""
        return self._pgconn.transaction_status == TransactionStatus.ACTIVE

    @property
    def rests(self) -> bool:
        """Tell whether no transaction is open: one stays failed where even its BEGIN or its ROLLBACK was cancelled."""
        return self._pgconn.transaction_status == TransactionStatus.IDLE

    def close(self) -> None:
        """Close the connection; never raises."""
        owed = self.owes
        if owed is not None and not owed.abandon():
            self.is_given_up = True
            return
        _open_connections.discard(self.connection)
        if not self.broken and self.busy:
            with suppress(psycopg.Error):  # else the server finishes the statement for nobody
                self.connection.cancel_safe(timeout=1.0)
        with suppress(psycopg.Error):  # it is gone either way
            self.connection.close()


def _unknown(error: BaseException, when: str) -> OutcomeUnknown:
    if isinstance(error, Overdue):
        return NoAnswer(f"The store did not answer in time {when}: it may or may not have been applied.")
    return OutcomeUnknown(f"The connection broke {when}: it may or may not have been applied.")


def connection_parameters(url: str, *, setting: str = "sidejob_database_url") -> dict[str, Any]:
    """Return libpq's parameters for a `postgresql://` URL, also for one in SQLAlchemy's spelling.

    Half-open connections are noticed within about ten seconds (keep-alives and `tcp_user_timeout`), not hours.
    """
    plain = _SCHEME.sub("postgresql://", url)
    try:
        given = conninfo_to_dict(plain)
    except psycopg.ProgrammingError as error:
        reason = _first_line(error).replace(plain, "…")
        raise SettingsError(f"{setting} cannot be read: {reason}") from None
    return {
        "application_name": "celery_sidejob",
        "connect_timeout": "5",
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
        "tcp_user_timeout": "10000",
        **given,
    }


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_open_connections: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()
_pools: weakref.WeakSet[Connections] = weakref.WeakSet()
_inherited: list[Any] = []


def _after_fork() -> None:
    """In a forked child: let go of the parent's sockets without a word to the server.

    A child that kept a copy would keep the parent's advisory lock alive after the parent's death, and one that
    closed it through libpq would say goodbye in the parent's name. So the descriptor is pointed at /dev/null.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for connection in list(_open_connections):
        with suppress(psycopg.Error, OSError):  # it may be closed already
            os.dup2(null, connection.fileno())
        _inherited.append(connection)  # never collected: its destructor would write to the descriptor
    os.close(null)
    _open_connections.clear()
    for pool in list(_pools):
        pool._forget()
    _process.shares_one = False


os.register_at_fork(after_in_child=_after_fork)
