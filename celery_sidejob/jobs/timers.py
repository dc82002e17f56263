"""A job's timers: requests for a later run, which has not begun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from ..model.changes import Ask, CancelTimer, Change, NewJob, Terminate
from ..model.checks import is_number, shown
from ..model.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class Timer:
    """A request for later, by ``eta=`` or ``countdown=`` of ``run()`` and ``enqueue()`` or by ``suspend(timeout=)``."""

    id: int | None
    """Its number, for `Job.cancel_timer`; None until the unit that sets it is committed."""
    due_at: datetime | None
    """When it fires; None for a ``countdown`` in a unit, because it counts from the commit."""
    ask: Literal["run", "force", "timeout"]
    """What it asks for: a run, a forced run, or the run that ends a wait unless another run begins first."""


def timers(rows: Sequence[Any], changes: Sequence[Change], job_id: int) -> list[Timer]:
    """Return a job's timers: those of these rows as the changes of a unit leave them, then the unit's own."""
    found = [Timer(row.id, row.due_at, row.ask) for row in rows]
    for change in changes:
        match change:
            case Terminate() if change.job_id == job_id:
                found = []
            case CancelTimer() if change.job_id == job_id:
                found = [timer for timer in found if timer.id != change.timer_id]
            case _:
                found += _set_by(change, job_id)
    return found


def timer_id(timer: Any) -> int:
    """Return the number of a timer, given as a `Timer` or as its number; InvalidValueError for anything else."""
    number = timer.id if isinstance(timer, Timer) else timer
    if isinstance(timer, Timer) and number is None:
        raise InvalidValueError(
            "cancel_timer() was given a timer that its own unit sets: it has no id before the commit. Commit the unit "
            "first, with job.checkpoint()."
        )
    if not is_number(number, least=1):
        raise InvalidValueError(f"cancel_timer() takes one of job.timers, or its id, not {shown(timer)}.")
    return number


def _set_by(change: Change, job_id: int) -> Iterator[Timer]:
    match change:
        case NewJob(id=asked, due_at=due_at, wait_s=wait_s):
            ask: Literal["run", "force"] = "run"
        case Ask(job_id=asked, due_at=due_at, wait_s=wait_s, of_parent=False):
            ask = "force" if change.force else "run"
        case _:
            return
    if asked == job_id and (due_at is not None or wait_s):
        yield Timer(None, due_at, ask)
