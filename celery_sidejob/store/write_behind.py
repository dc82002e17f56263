"""Write-behind: writes that may wait are made by the next statement that can carry them, or a little later.

No promise depends on them: if the process dies before, the sweeper or the worker makes up for them.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from ..model import native
from ..model.errors import StoreUnavailableError
from ..model.logger import logger

T = TypeVar("T")

PAGE = 100
"""How many rows one statement writes: so many are found by their index. A thousand marks took 70 ms, not 24."""
RETRY_S = 0.2
LINGER_S = 5.0
"""Seconds that the writing thread waits for more items before it ends."""


class WriteBehind(Generic[T]):
    """Pending writes of one kind in a process; each is made within `within_s` of being added.

    A thread writes items that no other statement has carried along. If an item cannot be written within `patience_s`
    more, because the store is unavailable, it is dropped. So is an item that `write` returns, to be tried again.
    """

    def __init__(
        self, name: str, write: Callable[[list[T]], Sequence[T] | None], *, within_s: float, patience_s: float = 0.0
    ) -> None:
        self._name = name
        self._write = write
        self._within_s = within_s
        self._patience_s = patience_s
        _all.add(self)
        self.forget()

    def forget(self) -> None:
        """After a fork, forget the pending writes, which belong to the parent."""
        self._lock = native.lock()
        self._waiting: deque[tuple[float, T]] = deque()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, things: Iterable[T]) -> None:
        """Have items written soon, by any thread."""
        now = time.monotonic()
        with self._lock:
            self._waiting.extend((now, thing) for thing in things)
            if self._thread is not None:
                self._wanted.set()
                return
            self._thread = thread = threading.Thread(target=self._run, name=f"sidejob-{self._name}", daemon=True)
        thread.start()  # not under the lock: with gevent the start waits

    def take(self, limit: int = PAGE, *, older_than_s: float = 0.0) -> list[tuple[float, T]]:
        """Take the oldest items, to write them; items that are not written go back by `give_back`."""
        oldest = time.monotonic() - older_than_s
        taken: list[tuple[float, T]] = []
        with self._lock:
            while self._waiting and len(taken) < limit and self._waiting[0][0] <= oldest:
                taken.append(self._waiting.popleft())
        return taken

    def give_back(self, taken: Iterable[tuple[float, T]]) -> None:
        """Return items that were taken and could not be written: another thread writes them."""
        with self._lock:
            self._waiting.extendleft(reversed(list(taken)))

    def write_if_late(self, added: int = 1) -> None:
        """Write pages whose time is half over: threads that add items do this, so that the writer seldom has to.

        A thread that has `added` a number of items writes at least as many, or a page, so that items do not pile up.
        """
        for _ in range(0, max(1, added), PAGE):
            if not self._is_late() or not (taken := self.take()) or not self._written(taken):
                return

    def write_now(self) -> None:
        """Write all pending items, or log why not; never raises for the store."""
        while taken := self.take():
            if not self._written(taken):
                return

    # ------------------------------------------------------------------------------------------------------------

    def _is_late(self) -> bool:
        with self._lock:  # otherwise another thread may take the oldest item between two calls
            return bool(self._waiting) and self._waiting[0][0] < time.monotonic() - self._within_s / 2

    def _written(self, taken: list[tuple[float, T]]) -> bool:
        """Write items; False if some must be tried again."""
        things = [thing for _, thing in taken]
        reason: object = "they have waited too long"
        try:
            again = self._write(things)
        except StoreUnavailableError as error:
            again, reason = things, error
        except Exception:
            again = None
            logger.exception("%d %s are not written", len(taken), self._name)
        except BaseException:  # a greenlet is killed, or a time limit strikes
            self.give_back(taken)
            raise
        if not again:
            return True
        deadline = time.monotonic() - self._within_s - self._patience_s
        kept = [(since, thing) for since, thing in taken if since > deadline and thing in again]
        self.give_back(kept)
        if len(kept) < len(again):
            logger.warning("%d %s are not written: %s", len(again) - len(kept), self._name, reason)
        return False

    def _run(self) -> None:
        """Write late items; return when none has come for a while."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._wanted.clear()
                since = self._waiting[0][0] if self._waiting else None
            if since is None:
                came = self._wanted.wait(LINGER_S)
                with self._lock:
                    if not came and not self._waiting:
                        self._thread = None
                        return
                continue
            time.sleep(max(0.0, since + self._within_s - time.monotonic()))
            late = self.take(older_than_s=self._within_s)
            if late and not self._written(late):
                time.sleep(RETRY_S)


_all: weakref.WeakSet[WriteBehind[Any]] = weakref.WeakSet()


def write_all_now() -> None:
    """Write all pending items of this process, which is about to end."""
    for one in list(_all):
        one.write_now()


atexit.register(write_all_now)
