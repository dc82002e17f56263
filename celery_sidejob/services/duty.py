"""What a service does in one turn: one duty after the other, and a duty that fails keeps no other from being done."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..model.errors import StoreUnavailableError
from ..store.errors import RowsLocked

logger = logging.getLogger("celery_sidejob")

Report = Counter[str]
"""What was counted: {name of a `Count`: number}."""


@dataclass(frozen=True, slots=True)
class Count:
    """Something that duties count, declared once: `PollReport`, `poll`, `stats` and the metrics are made from it."""

    name: str
    meaning: str
    """One sentence."""
    total: str | None = None
    """Its name among the totals of `stats` and the metrics; None: no total is kept."""
    kind: type[int] = int
    """bool: a report says whether it happened, and not how often."""
    is_work: bool = True
    """Whether it counts work done; a report without such a count is false."""


class Duty(ABC):
    """One thing that a service does: in each of its turns, or as often as `interval_s` says."""

    interval_s = 0.0
    counts: Sequence[Count] = ()
    """What people are shown of its reports, which may have more, for tests."""

    def __init__(self) -> None:
        self.due_at = float("-inf")
        """When it is to be done next, by the monotonic clock."""

    @property
    def name(self) -> str:
        """What it is called in logs."""
        return type(self).__name__

    def is_due(self) -> bool:
        """Tell whether it is to be done in this turn."""
        return time.monotonic() >= self.due_at

    def run_once(self, report: Report | None = None) -> Report:
        """Do it now, and count what that was in `report`, a new one by default; what precedes an error is counted."""
        self.due_at = time.monotonic() + self.interval_s
        report = Counter() if report is None else report
        self._do(report)
        return report

    @abstractmethod
    def _do(self, report: Report) -> None: ...


class Duties:
    """Does its duties in their order. The next turn begins behind a duty that has cut two turns short."""

    def __init__(self, *duties: Duty) -> None:
        self._duties = duties
        self._first = 0
        self._cutting: set[int] = set()
        """Those that have cut a turn short since the last whole one."""

    def do(self, report: Report) -> None:
        """Do all that are due, count in `report` what that was, then raise the first error; others are logged.

        A store that is away ends the turn, and is the error that is raised: each further duty might wait for it as
        long. But an error that looks so may be of one statement alone, which must not keep those behind it from being
        ever done.
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
                if isinstance(error, StoreUnavailableError) and not isinstance(error, RowsLocked):
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
