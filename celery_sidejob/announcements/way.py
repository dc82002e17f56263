"""The ways on which announcements travel: Redis' pub/sub, or Postgres' NOTIFY. Both look like this."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

Message = tuple[str, str]
"""A channel, and a message as JSON text."""


class Ear(Protocol):
    """A subscription on the server's side, of one client; used by one thread."""

    def hear(self, timeout_s: float) -> Sequence[Message]:
        """Return what has come, after at most this many seconds; raises the connection's error if it is lost."""

    def close(self) -> None:
        """End the subscription; never raises."""


class Way:
    """A server that passes messages on. Each way replaces the methods for which it does something."""

    def hears(self, channel: str, *, ask: bool = True) -> bool | None:
        """Tell whether somebody listens to a channel; None while that is not known, and somebody may.

        Never raises, and never waits for a server of its own; without `ask` the store is not asked either.
        """
        return False

    def open(self) -> None:
        """Connect, if need be. A process does not fork meanwhile."""

    def learn(self, channels: Iterable[str]) -> None:
        """Ask who listens, if the last answer is too old, or tells nothing of these channels."""

    def send(self, messages: Sequence[Message]) -> None:
        """Pass messages on, in order."""

    def fail(self) -> None:
        """Give the server a rest after an error: nobody listens until it is asked again. Never raises."""

    def close(self) -> None:
        """Close the connection; the next use opens another. Never raises."""

    def listen(self, channels: Sequence[str]) -> Ear:
        """Subscribe to channels, by exactly these names; StoreUnavailableError if the server does not answer."""
        raise NotImplementedError


class Nowhere(Way):
    """The way of a process whose settings lead nowhere: the reason is raised for those who want to listen."""

    def __init__(self, reason: Exception) -> None:
        self._reason = reason

    def listen(self, channels: Sequence[str]) -> Ear:
        raise self._reason
