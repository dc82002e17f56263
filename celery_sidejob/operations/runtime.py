"""What every operation needs: the store, and the ways out to the broker, the result backend and the observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..model.protocols import Broker, Observer, Publisher, Results, Tasks
from ..model.settings import Settings
from ..store.connection.connections import Connections
from .stores import Stores


def _at_once(work: Callable[[], None]) -> None:
    work()


@dataclass(frozen=True, slots=True)
class Runtime:
    """One of an app's stores, with the app's publisher, results and observer."""

    settings: Settings
    connections: Connections
    publisher: Publisher
    broker: Broker
    results: Results
    observer: Observer
    tasks: Tasks
    stores: Stores = field(default_factory=Stores)
    """All stores that durable tasks may be in, this one among them."""
    place: int = 0
    """Which of them this one is; 0 is the primary."""
    after_commit: Callable[[Callable[[], None]], None] = _at_once
    """Carries out what follows a commit: at once, or in another thread where this one may use nothing but the store."""

    @property
    def where(self) -> str:
        """What this store is called before its name is known: the setting it comes from."""
        return f"Store {self.place} of sidejob_failover_urls" if self.place else "The store of sidejob_database_url"

    def called(self, service: str) -> str:
        """Return what a service of this store is called in logs and among threads."""
        return f"{service}-{self.place}" if self.place else service
