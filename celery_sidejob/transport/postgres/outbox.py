"""What a connection asks of the worker whose store its broker is: rows of the outbox, which its references lead to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...model.durable import Held
from ...store.broker.holds import Holder


class Page(Protocol):
    """Runs that have ended well, whose rows one statement is to remove."""

    runs: Sequence[Held]
    over: frozenset[str] | None
    """The task ids of those whose rows it has removed; set by who has run it."""


class Outbox(Protocol):
    """The worker's side of the rows; without one the channels of a connection leave references to others."""

    @property
    def holder(self) -> Holder:
        """The worker of this connection, as the store knows it just now."""

    def asks(self) -> Holder:
        """Return in whose name the fetch that follows at once holds rows."""

    def compose(self, row: Any) -> dict[str, Any] | None:
        """Return kombu's message from a fetched row that is a reference, or None if it leads to nothing any more."""

    def ends(self) -> AbstractContextManager[Page]:
        """Yield what is to be removed with the next statement."""
