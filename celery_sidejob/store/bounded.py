"""Connections whose answers are not waited for without end: a frozen server takes a statement and says nothing."""

from __future__ import annotations

import time
from typing import Any

import psycopg


class Overdue(psycopg.OperationalError):
    """The deadline has passed."""


class BoundedConnection(psycopg.Connection[Any]):
    """A connection on which the server's answers may be waited for until a `deadline`, by the monotonic clock."""

    deadline: float | None = None

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait as psycopg does, and no longer than until the deadline."""
        if self.deadline is None:
            return super().wait(gen, *args, **options)
        return super().wait(self._until(gen), *args, **options)

    def hang_up_if_late(self) -> None:
        """Hang up and raise Overdue after the deadline: what was sent may yet be done, at any time."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.pgconn.finish()
            raise Overdue("no answer in time")

    def _until(self, gen: Any) -> Any:
        """Pass on between psycopg, which looks at us at least every tenth of a second, and its own generator."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                self.hang_up_if_late()
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value
