"""The one loop of the package: it runs a service again and again in a thread until it is stopped."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any, Protocol

from ..model import native
from ..model.errors import StoreUnavailableError
from ..model.logger import logger
from ..store.connection.turns import take_turns

LONGEST_PAUSE_S = 2.0
"""Seconds between two tries of a service that fails."""


class Service(Protocol):
    """Work that is repeated."""

    name: str

    def run_once(self) -> Any:
        """Do the due work, and report it."""

    def wait_s(self) -> float:
        """Return the seconds to wait before the next turn."""

    def close(self) -> None:
        """Release everything at the loop's end."""


class Loop:
    """Runs one service in its own thread; an error of the service is logged and does not end the loop.

    Where gevent has replaced threads, the thread is a greenlet beside those of the bodies. It may use the same things:
    connections to the broker and to the result backend, and users' receivers of our signals. Only an `unpatched` loop
    has a real thread there, for work that must go on while a body computes. Its service may use only the store.
    """

    def __init__(self, service: Service, *, unpatched: bool = False) -> None:
        self._service = service
        self._turn = turn()
        name = f"sidejob-{service.name}"
        self._stopped: threading.Event | native.Event = threading.Event()
        self._thread: threading.Thread | native.Thread = threading.Thread(target=self._run, name=name, daemon=True)
        if unpatched and native.is_patched():
            self._turn = turn(native.lock())
            self._stopped = native.Event()
            self._thread = native.Thread(self._run, name=name)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the current turn and end."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        take_turns()
        failures = 0
        while not self._stopped.is_set():
            try:
                with self._turn:
                    self._service.run_once()
                failures = 0
                pause_s = self._service.wait_s()
            except Exception as error:
                failures += 1
                pause_s = min(0.2 * 2**failures, LONGEST_PAUSE_S)
                if failures in (1, 10) or failures % 100 == 0:
                    logger.warning(
                        "%s failed (%d times in a row): %s",
                        self._service.name,
                        failures,
                        error,
                        exc_info=not isinstance(error, StoreUnavailableError),
                    )
            self._stopped.wait(pause_s)
        self._service.close()


# A process forked in the middle of a turn would inherit the locks that the turn holds (of an import, of a cached
# property). The thread that holds them does not exist in the new process, which would wait for them for ever. A fork
# therefore waits for the turns in progress. The wait is bounded: a turn that waits for a silent store must not delay
# the pool.
FORK_WAIT_S = 1.0


_turns: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[Any] = []


def turn(lock: Any = None) -> Any:
    """Return a lock that a thread of ours holds while it works, between two moments at which this process may fork."""
    made = threading.RLock() if lock is None else lock
    _turns.add(made)
    return made


def _before_fork() -> None:
    deadline = time.monotonic() + FORK_WAIT_S
    _held.extend(lock for lock in list(_turns) if lock.acquire(timeout=max(0.0, deadline - time.monotonic())))


def _after_fork() -> None:
    while _held:
        _held.pop().release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
