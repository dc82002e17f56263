"""The connection over which a transport runs its statements, one at a time, each a transaction of its own.

Over it a sender wakes consumers by rings: NOTIFY in a commit of its own, after the message's. A transaction that has
sent a NOTIFY commits under a lock of the whole server. With the INSERT in it that lock is held while the disk is
flushed, so that all senders wait for each other; alone it is held for microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg

from ...model.errors import SettingsError, StoreUnavailableError
from ...store.broker import consumers
from ...store.connection.bounded import forget_in_children
from ...store.connection.opening import Opener
from ...store.connection.own_executor import OwnExecutor
from ...store.errors import ATTEMPTS, REFUSED, in_the_way, refusal

T = TypeVar("T")
Run = Callable[[str, Callable[[OwnExecutor], Any]], Any]
"""Runs a named statement, as `Link.run` does."""

SETTING, DIRECT_SETTING = "broker_url", "sidejob_direct_url"
APPLICATION = "celery_sidejob_broker"
"""The name of these connections in `pg_stat_activity`, apart from those to the store."""
LOST = (psycopg.OperationalError, psycopg.InterfaceError, StoreUnavailableError)
"""The errors of a lost connection, or of one that cannot be opened."""
UNDONE = (pg.DeadlockDetected, pg.SerializationFailure, pg.QueryCanceled)
"""The errors with which Postgres gives up a statement of a connection that is as well as before."""

APART_S = 0.005
"""A process rings at most once in this time for a queue.

The messages that it sends meanwhile need no ring of their own: a consumer that was rung for looks again
`transport.BACK_OFF_S[0]` later, which is longer.
"""
MOST_RUNG = 10_000
"""How many queues' rings are remembered."""

_rung: dict[tuple[str, str], float] = {}

NOT_LATE = (
    "The transport option synchronous_commit cannot be 'off' through a proxy that pools transactions: its sessions are "
    "others' too. Set it for the broker's role: ALTER ROLE … SET synchronous_commit = off."
)


def carry_out(executor: OwnExecutor, name: str, work: Callable[[OwnExecutor], T], *, single: bool = True) -> T:
    """Do `work` in a transaction, once more if Postgres gives it up because others are in the way.

    A connection that counts as lost would have others do what this process does.
    """
    for _ in range(ATTEMPTS):
        try:
            return executor.in_transaction(name, work, single=single)
        except UNDONE as error:
            last = error
    raise in_the_way(name, last) from last


class Link:
    """Runs statements over one connection, which it opens when it is first used, and again after it was lost.

    Any thread may use it. A forked process opens its own.
    """

    def __init__(self, url: str, schema: str, *, direct_url: str | None = None, commits_late: bool = False) -> None:
        """`direct_url` leads to the same database past a proxy that pools transactions.

        With `commits_late` a statement answers before it is on the server's disk, and a crash may undo it.
        """
        self.url = url
        self.schema = schema
        self.channel = f"sidejobpg:{schema}"
        """The channel of NOTIFY on which the users of this schema wake each other."""
        self.answer_s: float | None = None
        """How long an answer may take; None for as long as the server answers at all."""
        self._opener = Opener(url, schema, setting=SETTING, application=APPLICATION)
        self._own_opener = (
            Opener(direct_url, schema, setting=DIRECT_SETTING, application=APPLICATION) if direct_url else self._opener
        )
        self._commits_late = commits_late
        self._executor: OwnExecutor | None = None
        self._lock = threading.RLock()
        forget_in_children(self)

    def open_session(self) -> OwnExecutor:
        """Open another connection, the caller's own, with a session of its own where one is to be had."""
        return self._set_up(self._own_opener.connect())

    def run(self, name: str, statement: Callable[[OwnExecutor], T], *, lastingly: bool = False) -> T:
        """Run one statement and return its answer; it is committed then.

        If it runs `lastingly`, no crash of the server undoes it, even over a link that commits late. Raises one of
        `LOST` if the connection breaks, and then it may have been committed as well; SchemaError if a table or a right
        is missing.
        """
        is_apart = lastingly and self._commits_late

        def work(executor: OwnExecutor) -> T:
            if is_apart:
                consumers.commit_lastingly(executor)
            return statement(executor)

        with self._lock:
            executor = self._ready()
            try:
                return carry_out(executor, name, work, single=not is_apart)
            except REFUSED as error:
                raise refusal(error, name, schema=self.schema, setting=SETTING) from error
            finally:
                if executor.broken or not executor.rests:
                    self.close()

    def ring(self, payload: str) -> None:
        """Wake the consumers that listen for this; one that does not hear it looks a little later.

        The answer is read before the next statement: who sends a message now and then need not wait twice.
        """
        with self._lock, suppress(*LOST):
            consumers.notify_soon(self._ready(), self.channel, payload)

    def ring_apart(self, payload: str) -> None:
        """Ring, unless this process has just done so."""
        key, now = (self.channel, payload), monotonic()
        if now - _rung.get(key, 0.0) < APART_S:
            return
        if len(_rung) > MOST_RUNG:
            _rung.clear()
        _rung[key] = now
        self.ring(payload)

    def _ready(self) -> OwnExecutor:
        """Return a connection on which nothing is under way, with a deadline for the next answer."""
        deadline = None if self.answer_s is None else monotonic() + self.answer_s
        if self._executor is not None:
            self._executor.connection.deadline = deadline
            if not self._executor.settle():
                self.close()
        if self._executor is None:
            self._executor = self._set_up(self._opener.connect(deadline))
        return self._executor

    def _set_up(self, executor: OwnExecutor) -> OwnExecutor:
        """Set what is set for a whole session."""
        try:
            if not executor.pooled:
                consumers.plan_by_index(executor)
                if self._commits_late:
                    consumers.commit_late(executor)
            elif self._commits_late:
                raise SettingsError(NOT_LATE)
        except BaseException:
            executor.close()
            raise
        return executor

    def close(self) -> None:
        """Close the connection."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def forget(self) -> None:
        """Leave the connection to the parent, of which this process was forked."""
        self._executor = None
        self._lock = threading.RLock()


def ring_of_queue(queue: str) -> str:
    """Return what is rung when a message has come."""
    return f"q:{queue}"


def ring_of_return(queue: str) -> str:
    """Return what is rung when messages have come back to their places, before those that were fetched since."""
    return f"b:{queue}"


def ring_of_exchange(exchange: str) -> str:
    """Return what is rung for a broadcast to everybody who listens to a fanout exchange."""
    return f"x:{exchange}"


def is_of_broadcast(ring: str) -> bool:
    """Tell whether a ring is of an exchange, and not of a queue."""
    return ring.startswith("x:")


BINDINGS = "bound"
"""What is rung when an exchange whose transient messages may be routed by old bindings has another one."""

DEATH = "dead"
"""What is rung when a consumer was found dead: what it held is free, in any queue."""
