"""What every operation needs: a store, and the ways to the broker, the result backend and the observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..model.protocols import Broker, Observer, Publisher, Results, Tasks
from ..model.settings import Settings
from ..store.connection.connections import Connections
from .stores import Store, Stores


def _at_once(work: Callable[[], None]) -> None:
    work()


@dataclass(frozen=True, slots=True)
class Runtime:
    """What an app's operations are given: one of its stores, and what all of its stores have in common."""

    store: Store
    stores: Stores
    """All of them. Jobs are in the primary; durable tasks may be in any."""
    publisher: Publisher
    broker: Broker
    results: Results
    observer: Observer
    tasks: Tasks
    after_commit: Callable[[Callable[[], None]], None] = _at_once
    """Carries out what follows a commit: at once, or in another thread where this one may use nothing but the store."""

    @property
    def settings(self) -> Settings:
        """The app's settings, with the store's own URLs."""
        return self.store.settings

    @property
    def connections(self) -> Connections:
        """The store's."""
        return self.store.connections

    def at(self, store: Store) -> Runtime:
        """Return the same in another store."""
        return replace(self, store=store)

    def in_each_store(self) -> list[Runtime]:
        """Return the same in each store, the primary first."""
        return [self.at(store) for store in self.stores]
