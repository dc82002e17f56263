"""Ends of runs that leave nothing to be done but the removal of their rows: the worker removes many in one statement.

The process of such a run only tells its worker that the body has ended well. The row stays held until the worker has
removed it, mostly with its next fetch. If the worker dies before, the run is repeated, as its task allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from ...model import native
from ...model.durable import Content, Held, Key

LATE_S = 0.05
"""After this time an end is removed by the heartbeat: there was no fetch with which it could go."""


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

    def __init__(self, later: Callable[[QuietEnd], None]) -> None:
        """`later` is given each end that cannot be written so."""
        self._later = later
        self._lock = native.lock()
        self._ends: dict[Held, QuietEnd] = {}
        self._waiting: list[QuietEnd] = []

    def add(self, end: QuietEnd) -> None:
        """Have an end written soon."""
        with self._lock:
            self._ends[end.held] = end
            self._waiting.append(end)

    def has(self, key: Key) -> bool:
        """Tell whether an end of this run is not written yet."""
        with self._lock:
            return any(end.key == key for end in self._ends.values())

    @property
    def are_late(self) -> bool:
        """Whether an end has waited for a fetch in vain."""
        with self._lock:
            return bool(self._waiting) and monotonic() - self._waiting[0].since >= LATE_S

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
