"""The messages that a transport has given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .durable import Key


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
