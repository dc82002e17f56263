"""How a job stands: its status, with the legal moves; the gate at which its message waits; how far its run has come."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum, StrEnum
from typing import Any

from .checks import is_text, shown
from .errors import InvalidValueError


class Status(StrEnum):
    """A job's status. ``queued`` during a run means: asked for again since this run was claimed."""

    QUEUED = "queued"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    FAILED = "failed"
    TERMINATING = "terminating"
    TERMINATED = "terminated"


MAY_WAIT = frozenset({Status.QUEUED, Status.TERMINATING, Status.SUSPENDED})
"""Statuses in which a job may wait for something: for a run, or for room on a port."""


def statuses_of(names: str | Iterable[str]) -> set[Status]:
    """Return the statuses of these names, or of one; InvalidValueError lists all statuses."""
    found = set()
    for name in [names] if isinstance(names, str) else names:
        try:
            found.add(Status(name))
        except (ValueError, RecursionError):  # Python's error shows the value itself
            raise InvalidValueError(f"{shown(name)} is no status; there are {', '.join(Status)}.") from None
    return found


FINISHED = frozenset({Status.COMPLETED, Status.FAILED, Status.TERMINATED})
"""The statuses that `Job.wait` waits for by default."""

UNFINISHED = tuple(status for status in Status if status not in FINISHED)
"""The statuses that `stats` and the metrics count beside failed jobs."""

ASKABLE = frozenset({Status.QUEUED, Status.RUNNING, Status.SUSPENDED, Status.COMPLETED})
"""The statuses from which a run may be asked for without force."""

_Q, _R, _S, _C, _F = Status.QUEUED, Status.RUNNING, Status.SUSPENDED, Status.COMPLETED, Status.FAILED
_TG, _TD = Status.TERMINATING, Status.TERMINATED

MOVES: dict[Status | None, frozenset[Status]] = {
    None: frozenset({_Q}),  # a new job
    # queued -> suspended, completed, failed: asked for again during the run, which now ends; announced, then queued.
    # The row stays queued, unless this was one lost run too many: then it is failed. Or the last timer was cancelled,
    # and only that timer owed a run.
    _Q: frozenset({_R, _TG, _S, _C, _F}),
    _R: frozenset({_Q, _S, _C, _F, _TG}),
    _S: frozenset({_Q, _TG}),
    _C: frozenset({_Q, _TG}),
    _F: frozenset({_Q, _TG}),
    _TG: frozenset({_TD, _Q}),  # -> queued: a forced run was asked for while it was terminating
    _TD: frozenset({_Q}),  # a forced run
}
"""Every legal move.

`tests/store/test_moves.py` compares it with the effects of the statements, under the schema's CHECKs. The diagram in
docs/lifecycle.md is drawn from it.
"""


class RunEnd(StrEnum):
    """How a run ended, whatever process ended it."""

    COMPLETED = "completed"
    SUSPENDED = "suspended"
    FAILED = "failed"
    RETRIED = "retried"
    """It raised an error, and will be tried again."""
    TERMINATED = "terminated"
    """It was the shutdown of its job."""
    LOST = "lost"
    """Its worker died, or gave it up because the store was unavailable."""
    GIVEN_BACK = "given back"
    """Its worker stops, or cannot run it after all. This is not a loss."""


class Gate(IntEnum):
    """The gate at which a message waits. Up to `QUEUE` its run is owed once it is due, above that it is not."""

    OPEN = 0
    """It waits at no gate."""
    QUEUE = 1
    """A managed queue had no room for a run: the message that was sent has gone by, until the queue lets one in."""
    POOL = 2
    """Its capacity pool has no slots for it."""
    WORKER = 3
    """It is parked: no worker of its queue knows the task."""
    JOBS = 4
    """Its job waits for other jobs."""


LONGEST_NOTE = 1000


@dataclass(frozen=True, slots=True)
class Progress:
    """The last progress that a run reported: `done` of `total`, and a `note`; `told_at` by the store's clock."""

    done: float | None
    total: float | None
    note: str | None
    run_no: int
    told_at: datetime

    @property
    def fraction(self) -> float | None:
        """The share that is done, from 0.0 to 1.0; None unless both numbers are known."""
        if self.done is None or not self.total:
            return None
        return min(1.0, self.done / self.total)

    def __str__(self) -> str:
        numbers = "" if self.done is None else f"{self.done:g}" + ("" if self.total is None else f" of {self.total:g}")
        return ": ".join(filter(None, (numbers, self.note)))


def check_progress(done: Any, total: Any, note: Any) -> None:
    """Raise InvalidValueError unless these values are a valid progress."""
    for name, value in (("done", done), ("total", total)):
        if value is not None and not (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        ):
            raise InvalidValueError(f"{name} of progress() is a number, at least 0, not {shown(value)}.")
    if note is not None and not (is_text(note) and len(note) <= LONGEST_NOTE):
        raise InvalidValueError(f"note of progress() is a text of up to {LONGEST_NOTE} characters, not {shown(note)}.")
