"""The two ways by which announcements travel, Redis' pub/sub and Postgres' NOTIFY, and their common interface."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

Message = tuple[str, str]
"""A channel, and a message as JSON text."""


class Ear(Protocol):
    """A client's subscription in the server; used by one thread."""

    def hear(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that have come, after at most this many seconds; raises if the connection is lost."""

    def close(self) -> None:
        """End the subscription; never raises."""


class Way:
    """A server that passes messages on. A subclass replaces the methods for which it has something to do."""

    def hears(self, channel: str, *, ask: bool = True) -> bool | None:
        """Tell whether a channel has a listener; None while that is unknown.

        Never raises, and never waits for the announcement server; without `ask` the store is not asked either.
        """
        return False

    def open(self) -> None:
        """Connect, if necessary. A process does not fork meanwhile."""

    def learn(self, channels: Iterable[str]) -> None:
        """Ask for listeners, if the last answer is too old or does not cover these channels."""

    def send(self, messages: Sequence[Message]) -> None:
        """Pass messages on, in order."""

    def fail(self) -> None:
        """Spare the server for a while after an error: until the next question there are no listeners. Never raises."""

    def close(self) -> None:
        """Close the connection; the next use opens another. Never raises."""

    def listen(self, channels: Sequence[str]) -> Ear:
        """Subscribe to channels by their exact names; StoreUnavailableError if the server does not answer."""
        raise NotImplementedError


class Nowhere(Way):
    """The way of a process whose settings are unusable: an attempt to listen raises the reason."""

    def __init__(self, reason: Exception) -> None:
        self._reason = reason

    def listen(self, channels: Sequence[str]) -> Ear:
        raise self._reason
