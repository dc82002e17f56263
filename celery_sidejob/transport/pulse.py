"""Whether the consuming thread makes progress: the heart beats in another thread and does not know.

A worker's loop comes round about once a second. While one of its callbacks does not return, nothing is fetched, begun
or acknowledged, so the messages of this worker belong to workers whose loops go on. Two waits are no reason to take its
messages away: the pool solo runs tasks in the loop's own thread, and a worker that must stop may wait for its tasks,
after its loop has ended or in the handler of a signal. The thread's stack tells these apart.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

from kombu.log import get_logger

logger = get_logger(__name__)

LOOP = "kombu.asynchronous.hub"
"""The module whose frame is on the stack of a thread while one of its loop's callbacks runs."""
ALLOWED = {"celery.app.trace", "celery.apps.worker"}
"""The modules in which a callback may stay for any time: they run a task's body, or handle a worker's signals."""


class Pulse:
    """The pulse of the thread that consumes on one connection; it may be stuck for `timeout_s` (None: for ever)."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._moved_at: float | None = None
        """The time of its last progress; None while no progress is expected, as for a consumer without a loop."""
        self._loops_in: int | None = None
        self._is_told = False

    def tick(self) -> float:
        """Note that the loop came round, which is expected from now on; returns how many seconds ago it last did."""
        now = monotonic()
        since = now - (self._moved_at or now)
        self._loops_in, self._moved_at = threading.get_ident(), now
        return since

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Expect that the data read in this block arrives, also without a loop."""
        if self._loops_in is None:
            self._moved_at = monotonic()
        try:
            yield
        finally:
            if self._loops_in is None:
                self._moved_at = None

    def stands_still(self) -> bool:
        """Tell whether the thread has been stuck for too long; another thread calls this; logged once."""
        moved_at = self._moved_at
        if self._timeout_s is None or moved_at is None or monotonic() - moved_at < self._timeout_s:
            self._is_told = False
            return False
        frames = [] if self._loops_in is None else _callback(self._loops_in)
        if self._loops_in is not None and (not frames or not ALLOWED.isdisjoint(map(_module, frames))):
            return False
        if not self._is_told:
            self._is_told = True
            where = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
            logger.error(
                "This consumer has been stuck for more than %g s: others will get its messages. It is stuck at\n"
                + ("".join(where.format()).replace("%", "%%") or "a read of Redis' answer"),
                self._timeout_s,
            )
        return True


def _callback(thread: int) -> list[FrameType]:
    """The stack of the loop's current callback in this thread, outermost first; empty outside a loop."""
    innermost = sys._current_frames().get(thread)
    inner: list[FrameType] = []
    for frame, _ in traceback.walk_stack(innermost) if innermost is not None else ():
        inner.append(frame)
        if _module(frame) == LOOP:
            return inner[::-1]
    return []


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
