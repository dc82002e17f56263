"""A transaction of our own, lent to calls that Celery makes while it is open."""

from __future__ import annotations

from collections.abc import Callable

from ..borrowed.of_psycopg import PsycopgTransaction
from .own_executor import OwnExecutor


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
