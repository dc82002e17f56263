"""Messages as a publisher sends them, encoded while their rows are being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Command = tuple[str, str]
"""The key of a list in Redis, and the message that is put there."""


class Line(Protocol):
    """A connection to Redis that does not wait for each answer."""

    def push(self, made: Sequence[Command]) -> None:
        """Send messages in order."""

    def hear(self) -> None:
        """Wait for the answers that are owed; raises the first refusal."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded messages, and the connection that was open when they were: with another one they are worth nothing."""

    line: Line
    made: Sequence[Command]

    def part(self, first: int, count: int) -> Encoded:
        """Return some of them."""
        return Encoded(self.line, self.made[first : first + count])
