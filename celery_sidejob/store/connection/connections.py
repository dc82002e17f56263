"""Lends and closes this process's connections to one store, and runs the package's own transactions on them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg

from ...model.errors import SchemaError, StoreUnavailableError
from ..borrowed.borrowed import Address, Borrowed
from ..borrowed.lending import borrow, check
from ..errors import (
    ATTEMPTS,
    REFUSED,
    UPGRADE,
    LacksRights,
    LockHeld,
    Moved,
    NoAnswer,
    OutcomeUnknown,
    Overdue,
    StoreDown,
    first_line,
    in_the_way,
    locked_out,
    refusal,
)
from ..meta import Database, cluster, look
from ..statement import Autocommit, Statement
from ..write_behind import WriteBehind
from . import turns
from .bounded import forget_in_children
from .opening import Opener
from .own_executor import Idle, OwnExecutor
from .turns import LONGEST_TURN_S, Turns, running_loop, takes_turns

T = TypeVar("T")
D = TypeVar("D", Database, Database | None)

REPEATED = (pg.DeadlockDetected, pg.SerializationFailure, pg.ForeignKeyViolation)
"""The errors after which a transaction is repeated."""

MESSAGES_KEY = "messages_pkey"
"""The constraint that Postgres names if an INSERT ... ON CONFLICT (job_id) has missed a message just being marked.

Its first read of the index may miss a row that moves to a new version meanwhile. The second read, which would start
over, comes after the check of the primary key, which raises. This was seen in one of a thousand asks during an endless
loop of updates.
"""

TIMEOUTS = tuple(
    getattr(pg, name) for name in ("IdleInTransactionSessionTimeout", "TransactionTimeout") if hasattr(pg, name)
)
"""The errors with which Postgres ends a session; the second is new in Postgres 17 and may be set for a role."""

READ = "read"
"""The name of a transaction that is one repeatable statement."""

QUICK = frozenset({READ, "lease", "mark"})
"""Transactions of one statement that never waits for a row that is locked for long."""
BRIEF = QUICK | {"durable-hold", "claim-page"}
"""Those of one statement that may wait for a table, or in rare cases for a row, but no longer than a turn.

Through a proxy, whose sessions have no time limit of ours, those that are not quick need a BEGIN.
"""


class _Thread(threading.local):
    """The settings of a thread for one store; see `Connections.talking`."""

    over: OwnExecutor | None = None
    within_s: float | None = None
    locked_s: float | None = None
    beside: tuple[Callable[[OwnExecutor], object], Callable[[OwnExecutor], object]] | None = None


class Connections(Autocommit):
    """Lends and closes this process's connections to one store."""

    def __init__(self, url: str | None, schema: str, **options: Any) -> None:
        """The parameters are those of `Opener`."""
        opener = Opener(url, schema, **options)
        self.connect = opener.connect
        self.schema = schema
        self.setting = opener.setting
        self.is_broker = opener.is_broker
        """Whether the store is Celery's broker as well: then its transactions also send the messages that they store.
        """
        self._idle = Idle()
        self._turns = Turns()
        self._thread = _Thread()
        self._database: Database | None = None
        self._seen: set[Address] = set()
        self._pid = os.getpid()
        self._deferred: dict[str, WriteBehind[Any]] = {}
        forget_in_children(self)

    def transact(
        self, name: str, work: Callable[[OwnExecutor], T], *, single: bool = False, within_s: float | None = None
    ) -> T:
        """Run `work` in one transaction of ours, commit it, and return its result.

        With `single` it is one statement, which needs no BEGIN and no COMMIT unless it waits for a lock. The whole
        `work` is repeated after a deadlock, if a job or a port that it had read was deleted before it wrote (seen by a
        foreign key), or if it raises `Moved`. It is repeated once if its connection had died while idle. `work` must
        not have effects outside the transaction. Raises `OutcomeUnknown` if the connection breaks during the commit
        (`NoAnswer` if the store has not answered `within_s`), `StoreUnavailableError` if nothing was committed:
        `RowsLocked` if a lock was held elsewhere for too long.
        """
        if running_loop() is not None and (elsewhere := turns.elsewhere()) is not None:
            done: T = elsewhere(partial(self.transact, name, work, single=single, within_s=within_s))
            return done
        if within_s is None:
            within_s = self._thread.within_s
        deadline = None if within_s is None else time.monotonic() + within_s
        if self._thread.beside is not None and name != READ:
            work, single = partial(_between, work, *self._thread.beside), False
        if self._thread.over is not None:
            return self._transact(name, work, deadline, single=single, in_turn=True)
        with self._turns.one():
            if takes_turns():
                return self._transact(name, work, deadline, single=single and name in BRIEF, in_turn=True)
            return self._transact(name, work, deadline, single=single, in_turn=False)

    def timed(
        self, name: str, work: Callable[[OwnExecutor], T], *, single: bool = False, within_s: float | None = None
    ) -> T:
        """Run `work` like `transact`; for transactions of runs, whose times a worker's connections record (`TIMED`)."""
        return self.transact(name, work, single=single, within_s=within_s)

    def _transact(  # noqa: PLR0912, PLR0915 - an arm for each way to fail
        self, name: str, work: Callable[[OwnExecutor], T], deadline: float | None, *, single: bool, in_turn: bool
    ) -> T:
        fresh = False
        for attempt in range(1, ATTEMPTS + 1):
            executor = self._acquire(deadline, fresh)
            executor.connection.deadline = deadline
            locked_s = self._thread.locked_s or (LONGEST_TURN_S if in_turn else None)
            if deadline is not None:  # so that a locked row is not mistaken for a silent store
                locked_s = min(locked_s or inf, (deadline - time.monotonic()) / 2)
            single = single and (name in QUICK or not executor.needs_begin)
            try:
                result = executor.in_transaction(name, work, single=single, locked_s=locked_s)
            except (*REPEATED, Moved) as error:
                self._release(executor)
                if attempt == ATTEMPTS:
                    raise in_the_way(name, error) from error
            except pg.UniqueViolation as error:
                self._release(executor)
                if attempt == ATTEMPTS or error.diag.constraint_name != MESSAGES_KEY:
                    raise
            except LockHeld as error:
                self._release(executor)
                raise locked_out(name, self.read(error.holder)) from error
            except REFUSED as error:
                self._release(executor)
                if single and not in_turn and isinstance(error, pg.LockNotAvailable):
                    single = False  # a transaction may wait for longer
                    continue
                raise refusal(error, name, schema=self.schema, setting=self.setting) from error
            except OutcomeUnknown:
                executor.close()
                self.close()  # the idle connections have probably died with it
                raise
            except (psycopg.OperationalError, psycopg.InterfaceError, *TIMEOUTS) as error:
                if not self._had_died_idle(executor, error) or fresh:
                    raise StoreDown(f"The store failed during {name!r}: {first_line(error)}") from error
                fresh = True  # nothing was sent: try again
            except BaseException:
                self._release(executor)
                raise
            else:
                self._release(executor)
                return result
        raise AssertionError("unreachable")

    def _had_died_idle(self, executor: OwnExecutor, error: BaseException) -> bool:
        """Close a connection that has failed; tell whether it had died while idle, by a restart of Postgres."""
        broken = executor.broken
        executor.close() if broken else self._release(executor)
        if isinstance(error, Overdue):
            self.close()  # the idle connections lead to the same silence
            return False
        return broken and executor.used

    def run(self, statement: Statement, /, **parameters: Any) -> list[Any]:
        """Run one repeatable statement as its own transaction."""
        return self.read(lambda executor: executor.run(statement, **parameters))

    def read(self, work: Callable[[OwnExecutor], T], *, within_s: float | None = None) -> T:
        """Run one repeatable statement, in `work`; StoreUnavailableError if there is no answer in time.

        Never raises `OutcomeUnknown`: a repeatable statement counts as not done.
        """
        try:
            return repeat(lambda: self.transact(READ, work, single=True, within_s=within_s))
        except OutcomeUnknown as error:
            raise StoreDown(str(error)) from error

    @contextmanager
    def talking(
        self, *, over: OwnExecutor | None = None, within_s: float | None = None, locked_s: float | None = None
    ) -> Iterator[None]:
        """Set how this thread talks to the store within the block; settings around the block do not count.

        `over`: the thread's own connection, for all its transactions. `within_s`: each transaction is answered within
        this time or given up, as in `transact`. `locked_s`: no transaction of several statements waits longer for a
        lock.
        """
        thread = self._thread
        before = thread.over, thread.within_s, thread.locked_s
        thread.over, thread.within_s, thread.locked_s = over, within_s, locked_s
        try:
            yield
        finally:
            thread.over, thread.within_s, thread.locked_s = before

    @property
    def waits_briefly(self) -> bool:
        """Whether this thread is to do other work rather than to wait for a lock: see `talking`."""
        return self._thread.locked_s is not None

    @contextmanager
    def beside(self, first: Callable[[OwnExecutor], object], last: Callable[[OwnExecutor], object]) -> Iterator[None]:
        """Within the block, begin and end each transaction of this thread with these; single reads are left out."""
        before, self._thread.beside = self._thread.beside, (first, last)
        try:
            yield
        finally:
            self._thread.beside = before

    def write_behind(self, name: str, make: Callable[[], WriteBehind[T]]) -> WriteBehind[T]:
        """Return this process's write-behind of this name for this store; it is made at the first use."""
        found = self._deferred.get(name)
        return found if found is not None else self._deferred.setdefault(name, make())

    @property
    def may_write_behind(self) -> bool:
        """Whether this thread runs users' calls and bodies. A service uses only its own connection."""
        return self._thread.over is None and not takes_turns()

    def write_behind_now(self) -> None:
        """Make all deferred writes."""
        for write_behind in list(self._deferred.values()):
            write_behind.write_now()

    def borrow(self, transaction: Any) -> Borrowed:
        """Return an executor over the caller's transaction, which must lead to this store's database.

        The database is checked once for each address of such connections.
        """
        borrowed = borrow(transaction, self.schema)
        borrowed.is_broker = self.is_broker
        address = borrowed.address
        if address is None or address not in self._seen:
            check(borrowed, self.schema, self._own_database)
            if address is not None:
                self._seen.add(address)
        return borrowed

    def _own_database(self) -> Database:
        """Identify the database to which our own connections lead."""
        if self._database is None:
            self._database = self.identify(partial(look, schema=self.schema))
        if self._database is None:
            raise SchemaError(f"Schema {self.schema!r} is missing. {UPGRADE}")
        return self._database

    def identify(self, look: Callable[[OwnExecutor], D]) -> D:
        """Return the database that `look` identifies, with its cluster, if this role may read that."""
        found = self.transact(READ, look)
        with suppress(LacksRights):
            return found and replace(found, cluster=self.transact(READ, cluster, single=True))
        return found

    def close(self) -> None:
        """Close idle connections; a connection that is in use is closed once it has been idle for too long."""
        self._idle.close()

    def _acquire(self, deadline: float | None, fresh: bool) -> OwnExecutor:
        if self._pid != os.getpid():
            self.forget()
        own = self._thread.over
        if own is not None:
            if own.broken:  # its owner will open another
                raise StoreDown("This thread's connection to the store is gone.")
            return own
        found = None if fresh else self._idle.take()
        return found if found is not None else self.connect(deadline)

    def _release(self, executor: OwnExecutor) -> None:
        if executor is self._thread.over:
            executor.lay_down()
        else:
            self._idle.give_back(executor)

    def forget(self) -> None:
        """After a fork, forget the connections and the deferred writes, which belong to the parent."""
        self._idle.forget()
        self._turns.forget()
        self._thread = _Thread()
        self._pid = os.getpid()
        for write_behind in self._deferred.values():
            write_behind.forget()


def _between(
    work: Callable[[OwnExecutor], T],
    first: Callable[[OwnExecutor], object],
    last: Callable[[OwnExecutor], object],
    executor: OwnExecutor,
) -> T:
    first(executor)
    result = work(executor)
    last(executor)
    return result


def repeat(once: Callable[[], T]) -> T:
    """Run `once`, and again if its answer was lost; if the second try fails too, the outcome stays unknown."""
    try:
        return once()
    except NoAnswer:
        raise
    except OutcomeUnknown as lost:
        try:
            return once()
        except OutcomeUnknown:
            raise
        except StoreUnavailableError as error:
            raise OutcomeUnknown(f"{lost} Then: {error}") from error
