"""Connections that do not wait for ever for an answer: a frozen server accepts a statement and never answers.

A forked child never sends anything on them.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import psycopg

from ...model import native
from ..errors import Overdue

SILENT_S = 5.0
"""Seconds to wait for an answer before another connection asks whether the store answers at all."""


_all: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()
"""The connections of this process, which every child must leave alone; those that are closed too, until they are gone.
"""


class BoundedConnection(psycopg.Connection[Any]):
    """A connection on which waits for the server's answers end at a `deadline`, by the monotonic clock.

    Without a deadline the wait lasts as long as the store `answers_elsewhere`: a statement may be slow, and a row may
    be locked. A frozen server and a frozen server behind a proxy look the same here, because their system keeps
    acknowledging what it receives.
    """

    deadline: float | None = None
    answers_elsewhere: Callable[[], bool] | None = None
    """Tells within a bounded time whether the store answers over another connection; None if that is not asked."""
    _waits_since = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _all.add(self)

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait as psycopg does, but only until the deadline, or while the store answers."""
        self.begin_to_wait()
        return super().wait(self._until(gen), *args, **options)

    def begin_to_wait(self) -> None:
        """Note that a wait for an answer begins."""
        self._waits_since = time.monotonic()

    def hang_up_if_late(self) -> None:
        """Hang up and raise Overdue if further waiting is useless: the statement may still be executed, at any time."""
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
        """Tell whether data has arrived in the meantime."""
        poll = native.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return bool(poll.poll(0))

    def _until(self, gen: Any) -> Any:
        """Pass values between psycopg, which calls us at least every tenth of a second, and its own generator.

        Some releases of psycopg 3.2 report data to read when only that tenth of a second is over.
        """
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                self.hang_up_if_late()
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


class Forgets(Protocol):
    """An object that has connections."""

    def forget(self) -> None:
        """After a fork, forget the parent's connections. Their sockets were detached before."""


def forget_in_children(one: Forgets) -> None:
    """Have `one` forget its connections in every child."""
    _forgetting.add(one)


_forgetting: weakref.WeakSet[Forgets] = weakref.WeakSet()
_inherited: list[Any] = []


def _after_fork() -> None:
    """In a forked child: detach the parent's sockets without sending anything to the server.

    A child that kept a copy would keep the parent's advisory lock alive after the parent's death. A child that closed
    it through libpq would end the session in the parent's name. The descriptor is therefore pointed at /dev/null.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for connection in list(_all):
        with suppress(psycopg.Error, OSError):  # it may already be closed
            os.dup2(null, connection.fileno())
        _inherited.append(connection)  # kept for ever: its destructor would write to the descriptor
    os.close(null)
    _all.clear()
    for one in list(_forgetting):
        one.forget()


os.register_at_fork(after_in_child=_after_fork)
