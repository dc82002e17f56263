"""A job's history, as its handle shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..model import values
from ..model.changes import Log


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Something that happened to a job."""

    at: datetime | None
    """When it happened; None for an entry of the run in progress that is not committed yet."""
    what: str
    """`made`; `claimed`: a run began; how a run ended, such as `completed` or `lost`; `moved`; `revived`; or an
    entry's own message."""
    run_no: int | None
    worker: str | None
    detail: dict[str, Any] | None
    """An error has `error`, `group` and `message`; other entries have who made the job (`by`); the `task` and `queue`
    to which it was moved; the status it was revived `from`; the data of an entry."""


def entry_of(row: Any, hide: Callable[[Any], Any]) -> HistoryEntry:
    """Return the entry of a row; `hide` is applied to the details of an error and to the data of an entry."""
    detail = None if row.detail is None else hide(values.decode(row.detail))
    return HistoryEntry(row.at, row.what, row.run_no, row.worker, detail)


def pending(entry: Log) -> HistoryEntry:
    """Return an entry that the run in progress has made."""
    detail = None if entry.detail is None else values.decode(entry.detail)
    return HistoryEntry(None, entry.message, entry.run_no, None, detail)
