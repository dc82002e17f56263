"""Places for the greenlets of one process that use a connection at the same time, given in the order of asking."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0
"""Seconds that a greenlet waits for a place before it continues without one."""


class Places:
    """A number of places. It needs no lock: greenlets of one thread give way to others only where they wait.

    A greenlet that has waited long continues without a place: the holders of the places may wait for a row that a
    user's transaction has locked, and the body of that transaction may wait here.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a place within the block, if one comes free in time."""
        placed = self._take()
        try:
            yield
        finally:
            if placed:
                self._give()

    def _take(self) -> bool:
        if self._free:
            self._free -= 1
            return True
        turn = threading.Event()
        self._waiting.append(turn)
        try:
            turn.wait(PATIENCE_S)
        except BaseException:  # the greenlet is killed
            if not self._leave(turn):
                self._give()
            raise
        return not self._leave(turn)

    def _leave(self, turn: threading.Event) -> bool:
        """Stop waiting; False if a place was given just now."""
        if turn.is_set():
            return False
        self._waiting.remove(turn)
        return True

    def _give(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1
