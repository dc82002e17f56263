"""What a connection asks of the worker whose store its broker is: rows of the outbox, which its references lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol, TypeVar

from ...store.broker.holds import Holder
from ...store.results import Ended

T = TypeVar("T")


class Page(Protocol):
    """Runs that have ended well, whose rows one statement is to remove."""

    runs: Sequence[Ended]
    over: Set[Any] | None
    """The task ids of those whose rows it has removed; set by who has run it."""


class Outbox(Protocol):
    """The worker's side of the rows; without one the channels of a connection leave references to others."""

    def asks(self) -> Holder:
        """Return in whose name the fetch that follows at once holds rows."""

    @property
    def is_busy(self) -> bool:
        """Whether the worker has fetched enough to go on for a while."""

    def compose(self, row: Any) -> dict[str, Any] | None:
        """Return kombu's message from a fetched row that is a reference, or None if it leads to nothing any more."""

    def unhold(self, rows: Sequence[Any]) -> None:
        """Give back the rows that fetched references lead to: they were held with the fetch, and are not delivered."""

    def with_ends(self, statement: Callable[[Page], T]) -> T:
        """Run a statement that is to remove the rows of runs that are over; again without them if they prevent it."""
