"""The sharing of connections within a process: all threads may share one, and greenlets share a few."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ...model import native

GREENLETS_SHARE = 10
"""The most connections that the greenlets of one process use at once, however many bodies they run."""

LONGEST_TURN_S = 1.0
"""Seconds that a service waits for a locked row before it lets the other services use the connection."""


class Turns:
    """Grants the use of the connections to one store."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._places = Places(GREENLETS_SHARE) if native.is_patched() else None

    def one(self) -> AbstractContextManager[Any]:
        """Return the lock to hold while this thread or greenlet uses a connection; entering it may wait."""
        if _thread.takes_turns or _process.shares_one:
            return self._lock
        return self._places.one() if self._places is not None else nullcontext()

    def forget(self) -> None:
        """After a fork, forget all users, which belong to the parent."""
        self._lock = threading.RLock()


def share_one() -> None:
    """Let all threads of this process, but not of its children, share one connection to each store."""
    _process.shares_one = True


def take_turns() -> None:
    """Let this thread share one connection with all threads that called this: their transactions wait for each other.

    No thread waits longer than `LONGEST_TURN_S` for a row: then StoreUnavailableError asks the caller to try again.
    """
    _thread.takes_turns = True


def takes_turns() -> bool:
    """Tell whether this thread shares the connection (`take_turns`)."""
    return _thread.takes_turns


class _Thread(threading.local):
    takes_turns = False


_thread = _Thread()


class _Process:
    shares_one = False


_process = _Process()


def _after_fork() -> None:
    _process.shares_one = False


os.register_at_fork(after_in_child=_after_fork)


PATIENCE_S = 5.0
"""Seconds that a greenlet waits for a permission before it continues without."""


class Places:
    """Permissions to use a connection. They need no lock: the greenlets of one thread switch only where they wait.

    A greenlet that has waited long continues without a permission: the greenlets that have one may wait for a row that
    a user's transaction has locked, and the body of that transaction may wait here.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Have a permission within the block, if one becomes free in time."""
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
        """Stop waiting; False if a permission was granted just now."""
        if turn.is_set():
            return False
        self._waiting.remove(turn)
        return True

    def _give(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1
