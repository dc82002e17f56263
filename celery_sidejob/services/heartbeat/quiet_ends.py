"""Ends of runs that leave nothing to be done but the removal of their rows: the worker removes many in one statement.

The process of such a run only tells its worker that the body has ended well. The row stays locked until the worker has
removed it a few milliseconds later: with its next fetch, where the store is the broker. If the worker dies before, the
run counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from ...model import native
from ...model.durable import Content, Held, Key
from ...operations.runtime import Runtime
from ...store.broker import holds

SOON_S = 0.005
"""How long an end waits for others."""
UNFETCHED_S = 0.05
"""How long it waits for a fetch with which it can go, where the store is the broker."""
REST_S = 1.0


@dataclass(eq=False, slots=True)
class QuietEnd:
    """The end of one run."""

    held: Held
    content: Callable[[], Content]
    """Returns what it has run."""
    is_unknown: bool = False
    """A statement that was to remove the row had no answer, and may have removed it."""
    since: float = field(default_factory=monotonic)

    @property
    def key(self) -> Key:
        """The key of its row."""
        return self.held.task_id, self.held.generation


class Page:
    """Ends that one statement is to remove."""

    def __init__(self, ends: Sequence[QuietEnd]) -> None:
        self._ends = ends
        self.runs = [end.held for end in ends]
        self.over: frozenset[str] | None = None
        """The task ids of those that were removed, once that is known; to be set by who runs the statement."""

    @property
    def left(self) -> list[QuietEnd]:
        """Those that were not: their rows are locked by a transaction, or are held by these runs no more."""
        return [end for end in self._ends if self.over is not None and end.held.task_id not in self.over]


class QuietEnds:
    """The ends of one worker in one store that are to be written; safe to use from any thread."""

    def __init__(self, runtime: Runtime, later: Callable[[QuietEnd], None]) -> None:
        """`later` is given each end that cannot be written so."""
        self.name = runtime.store.called("ends")
        self._connections = runtime.connections
        self._later = later
        self._wait_s = UNFETCHED_S if runtime.connections.is_broker else SOON_S
        self._bell = native.Bell()
        self._lock = native.lock()
        self._ends: dict[Held, QuietEnd] = {}
        self._waiting: list[QuietEnd] = []

    def add(self, end: QuietEnd) -> None:
        """Have an end written soon."""
        with self._lock:
            self._ends[end.held] = end
            self._waiting.append(end)
            is_first = len(self._waiting) == 1
        if is_first:
            self._bell.ring()

    def has(self, key: Key) -> bool:
        """Tell whether an end of this run is not written yet."""
        with self._lock:
            return any(end.key == key for end in self._ends.values())

    # -- in a loop of its own ----------------------------------------------------------------------------------------

    def run_once(self) -> int:
        """Write the ends that have waited long enough; returns how many there were."""
        return self.write() if self._due_in_s() == 0 else 0

    def write(self) -> int:
        """Write all ends that wait; returns how many there were."""
        with self.page() as page:
            if page.runs:
                remove = partial(holds.remove, runs=page.runs)
                page.over = self._connections.transact("durable-end", remove, single=True)
        return len(page.runs)

    def wait_s(self) -> float:
        """Wait until there is something to write."""
        due_in_s = self._due_in_s()
        if due_in_s is None:
            self._bell.wait(REST_S)
        return self._due_in_s() or 0.0

    def close(self) -> None:
        """Nothing is open: what is left is written when the worker leaves."""

    def _due_in_s(self) -> float | None:
        """Return in how many seconds the first end is due; None if none waits."""
        with self._lock:
            since = self._waiting[0].since if self._waiting else None
        return None if since is None else max(0.0, since + self._wait_s - monotonic())

    # -- in any statement --------------------------------------------------------------------------------------------

    @contextmanager
    def page(self) -> Iterator[Page]:
        """Yield the ends that are due, for one statement; if that raises they are due again."""
        with self._lock:
            ends, self._waiting = self._waiting, []
        page = Page(ends)
        try:
            yield page
        finally:
            left = page.left
            with self._lock:
                if page.over is None:
                    for end in ends:
                        end.is_unknown = True
                    self._waiting = [*ends, *self._waiting]
                else:
                    for end in ends:
                        if end not in left:
                            del self._ends[end.held]
            for end in left:
                self._later(end)

    def written(self, end: QuietEnd) -> None:
        """Note that an end was written otherwise, or refused."""
        with self._lock:
            self._ends.pop(end.held, None)
