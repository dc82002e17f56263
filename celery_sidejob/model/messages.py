"""Messages for the broker and outcomes for the result backend, as values.

Operations decide what must be sent and store it; `hooks` knows how Celery sends it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .checks import is_number
from .durable import Key
from .errors import InvalidValueError

FORMAT = 1
"""The version of the formats that we write into rows and messages."""


GONE = -1
"""Stands for the number of messages of a queue that does not exist."""


def is_readable(document: Mapping[str, Any]) -> bool:
    """Tell whether this version understands a message or a row; a newer format is for newer workers."""
    return int(document.get("v", 1)) <= FORMAT


def why_no_doorbell(header: object) -> str | None:
    """Say why the header of a job's message is invalid, or return None; a newer format is not checked."""
    if not isinstance(header, Mapping):
        return "it is no mapping"
    if not is_number(header.get("v", FORMAT)):
        return "its version is no number"
    if not is_readable(header):
        return None
    wrong = [name for name in ("job", "for_run") if not is_number(header.get(name))]
    return f"its {wrong[0]!r} is no number" if wrong else None


CONTINUATION = "continuation:"
"""The prefix of a continuation's row key."""


@dataclass(frozen=True, slots=True)
class Doorbell:
    """Says "go and look at this job": its run `for_run` is owed. Harmless when late, doubled or stale."""

    job_id: int
    for_run: int
    task_id: str
    task: str
    queue: str
    priority: int | None = None
    options: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, job_id: int, job: Any, message: Any, options: str | None) -> Doorbell:
        """Make the doorbell of a job's message; `options` are those of its asking, as JSON text."""
        return cls(
            job_id=job_id,
            for_run=message.for_run,
            task_id=message.task_id,
            task=job.task,
            queue=job.queue,
            priority=job.priority,
            options=json.loads(options) if options else None,
        )

    @classmethod
    def of_row(cls, row: Any) -> Doorbell:
        """Make the doorbell from a message that was read with its job and its asking."""
        return cls.of(row.job_id, row, row, row.options)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A whole publication that follows the end of an asking: a callback, or the rest of a chain."""

    task_id: str
    queue: str
    publication: str

    @property
    def key(self) -> str:
        """The key of its row. It differs from the task id, which the message of the resulting job may need."""
        return CONTINUATION + self.task_id

    @property
    def task(self) -> str:
        """The name of the task that it calls, if it can be read."""
        try:
            return str(json.loads(self.publication)["signature"]["task"])
        except (ValueError, TypeError, LookupError):
            return "?"

    @classmethod
    def of_row(cls, key: str, queue: str, publication: str) -> Continuation | None:
        """Make the continuation from a row; None if a newer version wrote it. InvalidValueError if it is unreadable."""
        try:
            if not is_readable(json.loads(publication)):
                return None
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidValueError(f"it cannot be read: {type(error).__name__}: {error}") from error
        return cls(key.removeprefix(CONTINUATION), queue, publication)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an asking ended: its status, and its result or error as JSON text; with the job's arguments, JSON too."""

    task_id: str
    job_id: int
    task: str
    queue: str
    outcome: str
    result: str
    options: Mapping[str, Any] | None
    args: str
    kwargs: str
    is_told: bool = False
    """Whether its end has written the result and counted the chord's part, so that only errbacks are to be called."""


@dataclass(frozen=True, slots=True)
class Buried:
    """A message in the transport's dead list."""

    text: bytes
    """The entry's text in the list, by which it is found again."""
    key: Key | None
    """The row of the message; None for a message without one."""
    store: str | None
    """The name of the store with that row, if there are several stores."""
    is_doorbell: bool
    """A doorbell: it only said that a job owes a run, and the store knows that without it."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a list was read that grows at its end: a number and the last entry, which reveal a removed entry."""

    number: int = 0
    last: bytes | None = None

    def past(self, texts: Sequence[bytes]) -> Cursor:
        """Return the cursor after further entries, which stay in the list."""
        return Cursor(self.number + len(texts), texts[-1]) if texts else self
