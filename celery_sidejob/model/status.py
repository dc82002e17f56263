"""A job's statuses, and the legal moves between them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from .checks import shown
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
