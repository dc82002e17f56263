"""What the broker's transport delivers to nobody any more, as the sweeper reads it: by its transport `sidejob://`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .durable import Key


@dataclass(frozen=True, slots=True)
class Buried:
    """A message in the transport's dead list."""

    text: bytes
    """As it is in the list, where it is found again by it."""
    key: Key | None
    """The row that it belongs to; None for a message without one."""
    store: str | None
    """The name of the store with that row, where there are several."""
    is_doorbell: bool
    """It only said that there is a job to be run, and whether that is owed is known without it."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a list was read whose end grows: by its number and its last entry, which tell if any was taken out."""

    number: int = 0
    last: bytes | None = None

    def past(self, texts: Sequence[bytes]) -> Place:
        """Return the place behind further entries, those that stay in the list."""
        return Place(self.number + len(texts), texts[-1]) if texts else self
