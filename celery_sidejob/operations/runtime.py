"""The environment of every operation: a store, and the ways to the broker, the result backend and the observers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..model.protocols import Announcer, Broker, Observer, Publisher, ResultRules, Results, Tasks
from ..model.settings import Settings
from ..store.connection.connections import Connections
from .audience import Audience
from .stores import Store, Stores
from .tracking import Tracking


class LocalRuntime(Protocol):
    """The part of a runtime that is given to code in an open transaction: nothing of it waits for a network."""

    @property
    def settings(self) -> Settings:
        """The app's settings."""

    @property
    def results(self) -> ResultRules:
        """What follows an asking's end."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The environment of an app's operations: one of its stores, and everything that its stores share."""

    store: Store
    stores: Stores
    """All stores. Jobs are in the primary; durable tasks may be in any."""
    publisher: Publisher
    broker: Broker
    results: Results
    observer: Observer
    tasks: Tasks
    announcer: Announcer
    audience: Audience
    tracking: Tracking
    after_commit: Callable[[Callable[[], None]], None] = operator.call
    """Does the work after a commit: at once, or in another thread if this one may use only the store."""

    settings: Settings = field(init=False)
    """The app's settings, with the store's own URLs."""
    connections: Connections = field(init=False)
    """The store's connections."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self.store.settings)
        object.__setattr__(self, "connections", self.store.connections)

    def at(self, store: Store) -> Runtime:
        """Return the same environment for another store."""
        return replace(self, store=store)

    def in_each_store(self) -> list[Runtime]:
        """Return the same environment for each store, the primary first."""
        return [self.at(store) for store in self.stores]
