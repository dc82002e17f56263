"""A message of an ordinary durable task, as a value; what says in it that a row stands behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

HEADER = "sidejob_durable"
"""The message's header: ``{"v": 1, "n": generation}``. A message without it has no row."""
REPUBLISHED = "sidejob_republished"
"""A header of copies: the store published it again, because the first was not heard of."""
WORKER = "sidejob_worker"
"""The request's key for the identity under which the worker claims; set by the parent for each delivery."""
ADOPTED = "sidejob_adopted"
"""The request's key for the whole message of a publisher without this package; set by the parent."""
AHEAD = "sidejob_ahead"
"""The request's key for the lock that was sent before the run begins, where the body runs in the parent's process."""
DEATHS = "sidejob_deaths"
"""A header of what was taken out of the dead set: its earlier deaths, the oldest first; retries bring it along."""
FORMAT = 2
"""The version of a publication. Code that knows continuations only, format 1, leaves such a row to others."""
HEADER_FORMAT = 1

ON_LOST = ("requeue", "dead")

Key = tuple[str, int]
"""(task id, generation)"""


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message: `body` is the bytes as published, `publication` (JSON text) all that goes around them.

    `generation` counts what was published under this task id: a retry is the next one, a copy the same.
    """

    task_id: str
    task: str
    queue: str
    publication: str
    body: bytes
    generation: int = 1
    eta: datetime | None = None
    expires_at: datetime | None = None
    again: bool = False
    about: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """What `publication` says, where this process has just made it: it need not be read back."""

    @classmethod
    def of_row(cls, row: Any) -> Message:
        """Make the message of a row that is to be published again."""
        return cls(
            row.task_id, row.task, row.queue, row.publication, bytes(row.body), row.generation,
            expires_at=row.expires_at, again=True,
        )  # fmt: skip


def header_of(generation: int) -> dict[str, int]:
    """Return what a message's header says."""
    return {"v": HEADER_FORMAT, "n": generation}


def key_of(task_id: str, header: Any) -> Key | None:
    """Return which row a delivery belongs to; None for one of a publisher without this package, or of a newer one."""
    if not isinstance(header, Mapping) or int(header.get("v", 1)) > HEADER_FORMAT:
        return None
    return task_id, int(header["n"])
