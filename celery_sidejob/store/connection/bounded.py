"""Connections whose answers are not waited for without end: a frozen server takes a statement and says nothing."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

import psycopg

from ...model import native
from ..errors import Overdue

SILENT_S = 5.0
"""How long an answer is waited for before the store is asked over another connection whether it answers at all."""


class BoundedConnection(psycopg.Connection[Any]):
    """A connection on which the server's answers may be waited for until a `deadline`, by the monotonic clock.

    Without a deadline they are waited for as long as the store `answers_elsewhere`: a statement may take its time, and
    a row may be locked. A server that is frozen, and one behind a proxy that is, look the same here, for their system
    goes on acknowledging what it receives.
    """

    deadline: float | None = None
    answers_elsewhere: Callable[[], bool] | None = None
    """Tells within a bounded time whether the store answers over another connection; None: that is not asked."""
    _waits_since = 0.0

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait as psycopg does, and no longer than until the deadline, or than the store answers."""
        self.begin_to_wait()
        return super().wait(self._until(gen), *args, **options)

    def begin_to_wait(self) -> None:
        """Take note that an answer is waited for from now on."""
        self._waits_since = time.monotonic()

    def hang_up_if_late(self) -> None:
        """Hang up and raise Overdue where there is no use in waiting: what was sent may yet be done, at any time."""
        if self._is_late():
            self.pgconn.finish()
            raise Overdue("no answer in time")

    def _is_late(self) -> bool:
        now = time.monotonic()
        if self.deadline is not None:
            return now > self.deadline
        if self.answers_elsewhere is None or now - self._waits_since < SILENT_S or self._has_answered():
            return False
        if not self.answers_elsewhere() and not self._has_answered():
            return True
        self.begin_to_wait()
        return False

    def _has_answered(self) -> bool:
        """Tell whether something has come meanwhile."""
        poll = native.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return bool(poll.poll(0))

    def _until(self, gen: Any) -> Any:
        """Pass on between psycopg, which looks at us at least every tenth of a second, and its own generator.

        Some releases of psycopg 3.2 say that there is something to read also where only that tenth of a second is over.
        """
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                self.hang_up_if_late()
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value
