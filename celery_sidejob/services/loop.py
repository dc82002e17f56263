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
        self._turn = Turn()
        name = f"sidejob-{service.name}"
        self._stopped: threading.Event | native.Event = threading.Event()
        self._thread: threading.Thread | native.Thread = threading.Thread(target=self._run, name=name, daemon=True)
        if unpatched and native.is_patched():
            self._turn = Turn(native.lock())
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


class Turn:
    """The work of one of our threads between two moments at which this process may fork: `with turn:`."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = threading.RLock() if lock is None else lock
        _turns.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def is_over_within(self, timeout_s: float) -> bool:
        """Wait for the turn's end, and let no other turn begin until `go_on`; False if it does not end in time."""
        return bool(self._lock.acquire(timeout=timeout_s))

    def go_on(self) -> None:
        """Let the next turn begin."""
        self._lock.release()


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()
_held: list[Turn] = []


def _before_fork() -> None:
    deadline = time.monotonic() + FORK_WAIT_S
    _held.extend(turn for turn in list(_turns) if turn.is_over_within(max(0.0, deadline - time.monotonic())))


def _after_fork() -> None:
    while _held:
        _held.pop().go_on()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
