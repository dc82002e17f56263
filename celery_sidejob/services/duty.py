"""The work of a service in one turn: its duties, one after the other. A duty that fails does not stop the others.

Nor does a job that fails in a duty stop the other jobs: it is set aside for a while.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..model.errors import StoreUnavailableError
from ..model.logger import log_row_error, logger
from ..store.errors import RowsLocked, StoreDown

Report = Counter[str]
"""The numbers that duties counted: {name of a `Count`: number}."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number that duties count, declared once: `PollReport`, `poll`, `stats` and the metrics follow from it."""

    name: str
    meaning: str
    """The meaning, in one sentence for people."""
    total: str | None = None
    """The name of its total in `stats` and the metrics; None if no total is kept."""
    kind: type[int] = int
    """bool if a report says only whether it happened, not how often."""
    is_work: bool = True
    """Whether it counts work; a report without any such count is false."""


class Duty(ABC):
    """One duty of a service, in each turn or every `interval_s` seconds."""

    interval_s = 0.0
    counts: Sequence[Count] = ()
    """The counts that are shown to people; a report may have more, for tests."""
    due_at = float("-inf")
    """When the duty is next due, by the monotonic clock."""

    @property
    def name(self) -> str:
        """The name of the duty in logs."""
        return type(self).__name__

    def is_due(self) -> bool:
        """Tell whether the duty is due in this turn."""
        return time.monotonic() >= self.due_at

    def run_once(self, report: Report | None = None) -> Report:
        """Do the duty now and add its counts to `report`, by default a new one. Work before an error counts."""
        self.due_at = time.monotonic() + self.interval_s
        report = Counter() if report is None else report
        self._do(report)
        return report

    @abstractmethod
    def _do(self, report: Report) -> None: ...


class Duties:
    """Does its duties in their order. If a duty cuts two turns short, the next turn begins with the duty after it."""

    def __init__(self, *duties: Duty) -> None:
        self._duties = duties
        self._first = 0
        self._cutting: set[int] = set()
        """The duties that have cut a turn short since the last complete turn."""

    def do(self, report: Report) -> None:
        """Do all duties that are due and count their work in `report`; raise the first error, log the others.

        An unavailable store ends the turn, and its error is raised: each further duty might wait as long for
        the store. But sometimes only one statement fails in this way, and the duties behind it must still be done.
        """
        failures: list[tuple[Duty, Exception]] = []
        count, first = len(self._duties), self._first
        self._first = 0
        cut = None
        for place in range(first, first + count):
            duty = self._duties[place % count]
            try:
                if duty.is_due():
                    duty.run_once(report)
            except Exception as error:
                failures.append((duty, error))
                if isinstance(error, StoreDown):
                    cut = place % count
                    break
        if cut in self._cutting:
            self._first = (cut + 1) % count
        self._cutting = set() if cut is None else self._cutting | {cut}
        if failures:
            _, raised = failures.pop(0 if cut is None else -1)
            for duty, other in failures:
                logger.warning("%s failed, and another duty too: %s", duty.name, other, exc_info=other)
            raise raised


SET_ASIDE_S = 5.0


class SetAside:
    """The jobs and channels that are set aside at present, and the work that failed for each."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, int | str], float] = {}

    @contextmanager
    def by_itself(self, what: str, name: int | str, *, kind: str = "Job") -> Iterator[bool]:
        """Do some work for one job; the job's own error is logged, and that work is set aside for a while.

        Work that needs a row locked by another transaction is set aside too. Yields whether to do the work now. An
        unavailable store is not the job's own error: it ends the turn.
        """
        now = time.monotonic()
        if self._until.get((what, name), now) > now:
            yield False
            return
        self._until.pop((what, name), None)
        try:
            yield True
        except RowsLocked as error:
            self._until[what, name] = time.monotonic() + SET_ASIDE_S
            logger.warning("%s %s is set aside for %g s, its %s waits: %s", kind, name, SET_ASIDE_S, what, error)
        except StoreUnavailableError:
            raise
        except Exception:
            self._until[what, name] = now + SET_ASIDE_S
            log_row_error(name, f"{kind} %s is set aside for %g s, its %s failed", name, SET_ASIDE_S, what)
