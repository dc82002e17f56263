"""A statement that was sent and is not waited for: this process works while the server does.

The server has it whole before `Connections.send` returns, and runs it though this process should die the next moment.
So nothing is put off by it but the knowledge of what came of it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg

from ...model.crash_points import AnswerLost, reach
from ..errors import Overdue

if TYPE_CHECKING:
    from .own_executor import OwnExecutor


class Sent:
    """One statement, a transaction of its own. Whoever uses its connection next receives the answer for it."""

    __slots__ = ("_executor", "_is_settled", "_lock", "error", "held", "name", "rows")

    def __init__(self, name: str, executor: OwnExecutor) -> None:
        self.name = name
        self.rows: list[Any] = []
        self.error: Exception | None = None
        """What there was in place of an answer, once it is settled: it may or may not have been applied."""
        self.held: OwnExecutor | None = None
        """Its connection, while nobody else is to have it."""
        self._executor = executor
        self._is_settled = False
        self._lock = threading.RLock()  # of greenlets there are none here

    def settle(self, deadline: float | None = None) -> None:
        """Wait for the answer, if nobody has yet; Overdue if somebody else waits for it still at the deadline."""
        timeout = -1 if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._lock.acquire(timeout=timeout):
            raise Overdue("no answer in time")
        try:
            if self._is_settled:
                return
            connection = self._executor.connection
            before, connection.deadline = connection.deadline, deadline
            try:
                self.rows = self._executor.receive()
                reach(f"{self.name}:after-commit")
            except (psycopg.Error, AnswerLost) as error:
                self.error = error
            finally:
                connection.deadline = before
            self._is_settled = True
            self._executor.owes = None
            if self._executor.is_given_up:
                self._executor.close()
        finally:
            self._lock.release()

    def abandon(self) -> bool:
        """Wait no longer: its connection is about to be closed. False if somebody waits for the answer just now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._is_settled:
                self.error = psycopg.OperationalError("the connection was closed")
                self._is_settled = True
                self._executor.owes = None
        finally:
            self._lock.release()
        return True
