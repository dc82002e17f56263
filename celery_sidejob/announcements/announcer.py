"""Sends announcements of committed changes to listeners: a small thread in each process, for which no caller waits."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..model.errors import SettingsError
from ..model.logger import logger
from ..services.loop import turn
from ..store.connection.bounded import forget_in_children
from .ways import Ear, Nowhere, Way

MOST = 10_000
MOST_BYTES = 16_000_000
"""The most bytes of waiting announcements; beyond that, announcements are dropped."""
AT_ONCE = 500
AT_ONCE_BYTES = 1_000_000
"""The most bytes of announcements that are sent together."""
IDLE_S = 5.0
"""The connection is closed after so many seconds without an announcement."""
LAST_S = 0.5
"""How long a process that ends waits for its last announcements, in seconds."""
WARN_S = 60.0


Announced = tuple[str, str, Callable[[], bool]]
"""A channel, a message as JSON text, and a callable that decides at the last moment whether it is announced."""


def always() -> bool:
    """Announce in any case."""
    return True


class Announcer:
    """The queue of announcements, and the thread that sends them.

    `make_way` finds the way at the first use. Only the thread waits for the way: announcements that do not fit into the
    queue are dropped and counted.
    """

    def __init__(self, make_way: Callable[[], Way]) -> None:
        self._make_way = make_way
        self._way: Way | None = None
        self._turn = turn()
        self._warned_at = float("-inf")
        self.dropped = 0
        """How many announcements of this process were dropped since it began."""
        self._begin()
        forget_in_children(self)
        _announcers.add(self)

    def _begin(self) -> None:
        # A signal handler may announce in the middle of an announcement. So the same thread may acquire the lock again,
        # and the bell is a SimpleQueue: the lock inside an Event cannot be acquired twice.
        self._lock = threading.RLock()
        self._queue: deque[Announced] = deque()
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._busy = False
        self._flushes: list[queue.SimpleQueue[None]] = []

    # -- for every thread ----------------------------------------------------------------------------------------

    def may_be_heard(self, channel: str, *, ask: bool = True) -> bool:
        """Tell whether a channel may have a listener; while that is unknown, have the thread ask.

        Without `ask` the store is not asked.
        """
        heard = self.way.hears(channel, ask=ask)
        if heard is None:
            self._wake()
        return heard is not False

    def announce(self, channel: str, text: str, wanted: Callable[[], bool] = always) -> None:
        """Have a message announced soon, if the channel may have a listener.

        The thread calls `wanted`, which may be slow, only once it knows that there is a listener.
        """
        if self.way.hears(channel) is False:
            return
        with self._lock:
            if len(self._queue) >= MOST or self._bytes + len(text) > MOST_BYTES:
                self.dropped += 1
                return
            self._queue.append((channel, text, wanted))
            self._bytes += len(text)
            self._busy = True
        self._wake()

    @property
    def way(self) -> Way:
        """The way by which this process announces and listens."""
        if self._way is None:
            try:
                self._way = self._make_way()
            except SettingsError as error:
                logger.warning("Nothing is announced: %s", error)
                self._way = Nowhere(error)
        return self._way

    def listen(self, channels: Sequence[str]) -> Ear:
        """Subscribe to channels by their exact names."""
        return self.way.listen(channels)

    def flush(self, within_s: float = LAST_S) -> bool:
        """Wait until all announcements so far are sent, for at most this many seconds; tell whether they are."""
        with self._lock:
            if not self._busy:
                return True
            done: queue.SimpleQueue[None] = queue.SimpleQueue()
            self._flushes.append(done)
        with suppress(queue.Empty):
            done.get(timeout=within_s)
            return True
        return False

    def close(self) -> None:
        """Send the waiting announcements, within `LAST_S`, and close the connection until the next announcement."""
        if self.flush() and self._way is not None:
            with self._turn:
                self._way.close()

    def forget(self) -> None:
        """After a fork, drop the thread, the queue and the connection, which belong to the parent."""
        _inherited.append(self._way)
        self._way = None
        self.dropped = 0
        self._begin()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Have the thread read the queue and ask for listeners; start one if none is there."""
        if self._bell.empty():
            self._bell.put(None)
        with self._lock:  # where a thread that has heard nothing decides to end
            if self._thread is not None:
                return
            self._thread = thread = threading.Thread(target=self._run, name="sidejob-announcements", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or no further thread is possible just now
            with self._lock:
                self._thread = None
                self._queue.clear()
                self._bytes = 0
            self._rest()

    def _run(self) -> None:
        mine, bell = self._queue, self._bell
        while mine is self._queue:
            try:
                bell.get(timeout=IDLE_S)
            except queue.Empty:
                with self._turn:
                    self.way.close()
                with self._lock:
                    if self._queue or not bell.empty():
                        continue
                    if mine is self._queue:
                        self._thread = None
                    return
            self._send(self._taken())
            while batch := self._taken():
                self._send(batch)
            self._rest()

    def _taken(self) -> list[Announced]:
        """Take the next announcements out of the queue."""
        batch: list[Announced] = []
        size = 0
        with self._lock:
            while self._queue and len(batch) < AT_ONCE and (not batch or size + len(self._queue[0][1]) < AT_ONCE_BYTES):
                batch.append(self._queue.popleft())
                size += len(batch[-1][1])
            self._bytes -= size
        return batch

    def _rest(self) -> None:
        with self._lock:
            if self._queue:
                return
            self._busy = False
            flushes, self._flushes = self._flushes, []
        for done in flushes:
            done.put(None)

    def _send(self, batch: Sequence[Announced]) -> None:
        way = self.way
        try:
            with self._turn:
                way.open()
            way.learn([channel for channel, _, _ in batch])
            heard = [(channel, text) for channel, text, wanted in batch if way.hears(channel) is not False and wanted()]
            if heard:
                way.send(heard)
        except Exception as error:
            self.dropped += len(batch)
            with self._turn:
                way.fail()
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_S:
            self._warned_at = now
            logger.warning("Announcements are dropped (%s: %s)", type(error).__name__, error)


def flush_all() -> None:
    """Send everything that was announced in this process, which is about to end."""
    for announcer in list(_announcers):
        announcer.flush()


_announcers: weakref.WeakSet[Announcer] = weakref.WeakSet()
atexit.register(flush_all)

_inherited: list[Any] = []
"""The parent's ways, kept so that not even their destructors write to the parent's sockets."""
