"""A statement that was sent and is not waited for: this process works while the server does.

The server has it whole before `Connections.send` returns, and runs it though this process should die the next moment.
So nothing is put off by it but the knowledge of what came of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

from ..model import native
from ..model.crash_points import AnswerLost, reach

if TYPE_CHECKING:
    from .connection import OwnExecutor


class Sent:
    """One statement, a transaction of its own. Whoever uses its connection next receives the answer for it."""

    __slots__ = ("_executor", "_is_settled", "_lock", "error", "name", "rows")

    def __init__(self, name: str, executor: OwnExecutor) -> None:
        self.name = name
        self.rows: list[Any] = []
        self.error: Exception | None = None
        """What there was in place of an answer, once it is settled: it may or may not have been applied."""
        self._executor = executor
        self._is_settled = False
        self._lock = native.lock()

    def settle(self) -> None:
        """Wait for the answer, if nobody has yet."""
        with self._lock:
            if self._is_settled:
                return
            try:
                self.rows = self._executor.receive()
                reach(f"{self.name}:after-commit")
            except (psycopg.Error, AnswerLost) as error:
                self.error = error
            self._is_settled = True
            self._executor.owes = None
