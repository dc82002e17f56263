"""Connections to a store that are not in use."""

from __future__ import annotations

import threading
import time

from ...model import native
from .own_executor import OwnExecutor

IDLE_S = 5.0


class Idle:
    """Keeps idle connections for the next use, and closes each once it was idle for `IDLE_S`."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """After a fork, forget the idle connections, which belong to the parent."""
        self._lock = native.lock()
        self._idle: list[tuple[float, OwnExecutor]] = []
        self._reaper: threading.Thread | None = None

    def take(self) -> OwnExecutor | None:
        """Take an idle connection, if there is one."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                executor = self._idle.pop()[1]
            if executor.broken or executor.dropped_within(0):  # Postgres was restarted, or closed an idle connection
                executor.close()
                continue
            executor.used = True
            return executor

    def give_back(self, executor: OwnExecutor) -> None:
        """Keep a connection after use, unless it cannot be used again."""
        if not executor.lay_down():
            return
        with self._lock:
            self._idle.append((time.monotonic(), executor))
            if self._reaper is not None:
                return
            self._reaper = reaper = threading.Thread(target=self._reap, name="sidejob-idle-connections", daemon=True)
        reaper.start()  # not under the lock: with gevent the start waits

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, executor in idle:
            executor.close()

    def _reap(self) -> None:
        """Close connections that were idle for `IDLE_S`; return when there are none."""
        while True:
            with self._lock:
                now = time.monotonic()
                old = [executor for since, executor in self._idle if now - since >= IDLE_S]
                self._idle = [(since, executor) for since, executor in self._idle if now - since < IDLE_S]
                if not self._idle:
                    self._reaper = None
                wait = IDLE_S - (now - self._idle[0][0]) if self._idle else None
            for executor in old:
                executor.close()
            if wait is None:
                return
            time.sleep(wait)
