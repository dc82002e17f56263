"""The thread that listens for results, for all that wait in this process, over one session.

It is started by the first caller that waits, and ends when nobody has waited for a while. What it hears it reads, and
hands over as bytes: a caller decodes its results in its own thread. Behind the notifications it looks for itself, at
growing intervals: one may be lost with a connection, and through a proxy that pools transactions none is heard.
"""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from time import monotonic, sleep

from ..model.logger import logger
from ..model.native import Pipe
from ..store import results
from ..store.connection.bounded import forget_in_children
from ..store.connection.opening import Opener
from ..store.connection.own_executor import OwnExecutor

BACK_OFF_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""When it looks for itself, after somebody began to wait, and after each notification."""
DEAF_S = 0.5
"""The longest pause between two looks if it hears nothing, or only of results that others wait for.

The process that tells of these may have told of one more, just after them, to nobody: see `place.APART_S`.
"""
SHARE = 20
"""A look comes again after this many times as long as it took, at least."""
IDLE_S = 30.0
"""The session is closed after so many seconds in which nobody waits."""
READY_S = 5.0
"""The longest time that a caller waits for the session; then it waits for its result, which will be looked for."""
LOCKED_S = 0.002
"""The pause before it asks again for the lock of listeners, which a session that keeps a result has for a moment."""
AWAY_S = (0.1, 0.5, 1.0, 2.0)
"""The pauses between attempts to connect."""


class Wait:
    """What one caller waits for: `keys`, each with the body that was handed over last."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys: dict[str, bytes | None] = dict.fromkeys(keys)
        self.told: Callable[[], object] = lambda: None
        """Is called, in any thread, after something has been handed over."""
        self._come: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def hand_over(self, found: Mapping[str, bytes]) -> None:
        """Have the caller take what was found, unless it has that."""
        with self._lock:  # the caller looks too, as it begins to wait
            for key in self.keys.keys() & found.keys():
                if self.keys.get(key, b"") != found[key]:
                    self.keys[key] = found[key]
                    self._come.put((key, found[key]))
                    self.told()

    def take(self, timeout_s: float) -> Iterator[tuple[str, bytes]]:
        """Yield what has come, key and body; wait for the first for at most this long."""
        with suppress(queue.Empty):
            yield self._come.get(timeout=timeout_s) if timeout_s > 0 else self._come.get_nowait()
            while True:
                yield self._come.get_nowait()


class Ear:
    """Listens in one schema of one database. Any thread may wait; a forked process begins anew."""

    def __init__(self, opener: Opener, schema: str) -> None:
        self._opener = opener
        self._schema = schema
        forget_in_children(self)
        self.forget()

    def forget(self) -> None:
        """After a fork, leave the session to the parent, and forget who waits there."""
        self._lock = threading.Lock()
        self._waits: set[Wait] = set()
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._wakes: Pipe | None = None
        self._rung: set[str] = set()
        self._is_all_rung = False
        self._look_at = inf
        self._step = 0
        self._hears = False

    @property
    def listens(self) -> bool:
        """Whether notifications are heard just now."""
        return self._thread is not None and self._hears

    @contextmanager
    def waiting(self, wait: Wait, deadline: float) -> Iterator[None]:
        """Hand over what comes for this caller within the block, to whose beginning it listens, if it can.

        It listens later if there is no session by the caller's deadline.
        """
        with self._lock:
            self._waits.add(wait)
            if self._thread is None:
                self._wakes = Pipe()
                self._ready.clear()
                self._thread = threading.Thread(target=self._run, name="sidejob-results-ear", daemon=True)
                self._thread.start()
        try:
            self._ready.wait(max(0.0, min(READY_S, deadline - monotonic())))
            if self._look_at > monotonic() + BACK_OFF_S[0]:
                self._look_soon()
                self._wake()
            yield
        finally:
            self._waits.discard(wait)

    def _look_soon(self) -> None:
        self._step = 0
        self._look_at = min(self._look_at, monotonic() + BACK_OFF_S[0])

    def _wake(self) -> None:
        wakes = self._wakes
        if wakes is not None:
            wakes.write()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                executor = self._opener.connect()
                try:
                    self._hears = self._listen(executor)
                    failures = 0
                    self._ready.set()
                    self._look_soon()  # something may have come while there was no session
                    self._go_on(executor)
                    return
                finally:
                    self._hears = False
                    executor.close()
            except Exception as error:
                if not failures:
                    logger.warning("Results are not heard of for now, and looked for again: %s", error)
                self._ready.set()
                sleep(AWAY_S[min(failures, len(AWAY_S) - 1)])
                failures += 1
                if self._ends(0.0):
                    return

    def _listen(self, executor: OwnExecutor) -> bool:
        """Listen, and tell whether that is possible."""
        if executor.pooled:
            return False
        while not results.listen(executor, self._schema, self._hear):
            sleep(LOCKED_S)
        return True

    def _hear(self, keys: Sequence[str] | None) -> None:
        if keys is None:
            self._is_all_rung = True
        else:
            self._rung.update(keys)

    def _go_on(self, executor: OwnExecutor) -> None:
        assert self._wakes is not None
        poll = select.poll()  # gevent's own under gevent, so that other greenlets go on
        poll.register(executor.connection.fileno(), select.POLLIN)
        poll.register(self._wakes.fileno(), select.POLLIN)
        waited_at = monotonic()
        while True:
            executor.take_in()  # the answer to the last look may have brought some, of which no file tells
            if not self._rung and not self._is_all_rung:
                poll.poll(1000 * max(0.0, min(self._look_at - monotonic(), IDLE_S)))
                self._wakes.drain()
                executor.take_in()
            now = monotonic()
            if self._waits:
                waited_at = now
            elif self._ends(waited_at + IDLE_S):
                return
            self._look(executor, now, longest_s=BACK_OFF_S[-1] if self._hears else DEAF_S)

    def _look(self, executor: OwnExecutor, now: float, *, longest_s: float) -> None:
        """Read what was rung for, or all that is waited for if it is time."""
        wanted = {key for wait in list(self._waits) for key in list(wait.keys)}
        heard, self._rung = self._rung, set()
        rung = wanted & heard
        is_time = now >= self._look_at or self._is_all_rung
        self._is_all_rung = False
        if is_time:
            rung = wanted
        self._hand_over(executor, list(rung))
        if not wanted:
            self._look_at = inf
        elif is_time:
            pause_s = min(BACK_OFF_S[self._step], longest_s)
            self._step = min(self._step + 1, len(BACK_OFF_S) - 1)
            self._look_at = monotonic() + max(pause_s, SHARE * (monotonic() - now))
        elif rung:
            self._look_soon()
        elif heard:
            self._look_at = min(self._look_at, now + DEAF_S)

    def _hand_over(self, executor: OwnExecutor, keys: Sequence[str]) -> None:
        for page in results.pages(keys):
            found = executor.in_transaction("read", partial(results.read, keys=page), single=True)
            for wait in list(self._waits):
                wait.hand_over(found)

    def _ends(self, at: float) -> bool:
        """End the thread if nobody waits and it is time; the next caller that waits starts another one."""
        with self._lock:
            if self._waits or monotonic() < at:
                return False
            self._thread = None
            wakes, self._wakes = self._wakes, None
        if wakes is not None:
            wakes.close()
        return True
