"""Who in a process waits for a connection to the store: all threads may share one, and greenlets share a few.

An event loop goes on while its thread asks the store, or the call is named that its code should await instead.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ...model import native
from ...model.logger import logger

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
    """Permissions to use a connection, given in the order of asking.

    gevent's own semaphore would give one that was just returned to the same greenlet again, if that asks at once. No
    lock is needed: the greenlets of one thread switch only where they wait.

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


Elsewhere = Callable[[], Callable[[Callable[[], Any]], Any] | None]
"""Returns what does work in another thread while the loop goes on, or None if the code in progress is not to wait so.
"""

_OWN = str(Path(__file__).parents[2])
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
_told_of: set[str] = set()
running_loop = asyncio._get_running_loop
"""Returns the event loop that is in progress in this thread; the public one raises without a loop, which costs more."""
_elsewhere: Elsewhere = lambda: None  # noqa: E731 - until a pool has an event loop


def wait_elsewhere_by(elsewhere: Elsewhere) -> None:
    """Set how work is done elsewhere."""
    global _elsewhere
    _elsewhere = elsewhere


def elsewhere() -> Callable[[Callable[[], Any]], Any] | None:
    """Return what does work in another thread; without it the loop is blocked, and the user's call is named."""
    found = _elsewhere()
    if found is None:
        _warn_once()
    return found


def wait_for(lock: threading.RLock) -> None:
    """Wait until a lock is free, while the loop goes on; where it cannot, who takes the lock waits."""
    waits_elsewhere = _elsewhere() if running_loop() is not None else None
    while waits_elsewhere is not None and not lock.acquire(blocking=False):
        waits_elsewhere(partial(_take, lock))
    if waits_elsewhere is not None:
        lock.release()


def _take(lock: threading.RLock) -> None:
    with lock:
        pass


def _warn_once() -> None:
    """Warn of the verb through which user code has come here, once for each verb."""
    verb: FrameType | None = sys._getframe(1)
    caller = verb
    while caller is not None and caller.f_code.co_filename.startswith((_OWN, *_LIBRARIES)):
        verb, caller = caller, caller.f_back
    if caller is None or verb is None:  # Celery's tracer, or SQLAlchemy, in its own time
        return
    name = verb.f_code.co_name
    if name in _told_of:
        return
    _told_of.add(name)
    logger.warning(
        "%s() in line %d of %s asks the store, and the event loop of this thread stands still meanwhile. Await it "
        "instead: %s. The log tells this once for each call.",
        name,
        caller.f_lineno,
        caller.f_code.co_filename,
        _awaited(name, verb.f_locals.get("self")),
    )


def _awaited(name: str, handle: Any) -> str:
    if hasattr(type(getattr(handle, "aio", None)), name):  # of the instance, a property would ask the store
        return f"await ….aio.{name}(…)"
    if name == "each":
        return "async for … in job.aio.for_inputs(…)"
    if name in ("delay", "apply_async", "enqueue", "get"):
        return f"await ….a{name}(…)"
    return f"await asyncio.to_thread(….{name}, …)"
