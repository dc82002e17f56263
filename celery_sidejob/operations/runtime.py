"""The environment of every operation: a store, and the ways to the broker, the result backend and the observers."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from ..model.errors import SchemaError, StoreUnavailableError
from ..model.protocols import Announcer, Broker, Observer, Publisher, ResultRules, Results, Tasks
from ..model.settings import Settings
from ..store.connection.connections import Connections
from ..store.statement import Transaction
from .audience import Audience, Tracking
from .stores import Store, Stores

T = TypeVar("T")

PAUSE_S = 0.2
"""Seconds between two tries to reach an unavailable store."""


class LocalRuntime(Protocol):
    """The part of a runtime for code in an open transaction: none of it waits for a network."""

    @property
    def settings(self) -> Settings:
        """The app's settings."""

    @property
    def results(self) -> ResultRules:
        """The rules for what follows the end of an asking."""


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
    """Does the work after a commit: at once, or in another thread if this thread may use only the store."""

    settings: Settings = field(init=False)
    """The app's settings, with the store's own URLs."""
    connections: Connections = field(init=False)
    """The store's connections."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self.store.settings)
        object.__setattr__(self, "connections", self.store.connections)

    def at(self, store: Store) -> Runtime:
        """Return the same environment with another store."""
        return replace(self, store=store)

    def at_place(self, place: int) -> Runtime:
        """Return the same environment for the store at a position; 0 is the primary."""
        return self.at(self.stores[place])

    def in_each_store(self) -> list[Runtime]:
        """Return the same environment with each store, the primary first."""
        return [self.at(store) for store in self.stores]

    def of_row(self, store: str | None) -> list[Runtime]:
        """Return the same environment for the stores that may have a row: the store named by its message, or each."""
        return self.in_each_store() if store is None else [self.at(self.stores.named(store))]

    def inspect_others(self, work: Callable[[Transaction], T]) -> Iterator[T]:
        """Yield the answer of each other store to a question of a command or a monitor."""
        for store in self.stores.others(self.store):
            yield store.connections.transact("inspect", work, within_s=self.stores.look_s(store))

    # -- this store among the others -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of this store, which is read only once; StoreUnavailableError if the store does not answer."""
        return self.stores.name_of(self.store)

    @property
    def label(self) -> str | None:
        """The name of this store for people; None for the primary."""
        return self.stores.label_of(self.store)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other store, which could have copies of rows."""
        return not self.stores.several

    def may_have(self, row_of: str | None) -> bool:
        """Tell whether this store may have the row of a message; with several stores the message names one."""
        return self.is_alone or row_of in (None, self.name)

    @property
    def wait_s(self) -> float:
        """Seconds that a caller waits for this store."""
        return self.stores.wait_s

    @property
    def look_s(self) -> float:
        """Seconds that a command or a monitor waits for the data of this store."""
        return self.stores.look_s(self.store)

    @property
    def patience_s(self) -> float | None:
        """Seconds that a run's statements wait for an answer: without another store None, while this one answers."""
        return None if self.is_alone else self.settings.lease


def patiently(runtime: Runtime, once: Callable[[], T]) -> T:
    """Repeat `once`, for a lease, while the store is unavailable: a short outage must not make a run fail.

    It also repeats while a table or a right is missing, as during an upgrade by hand or a restore.
    """
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            return once()
        except (StoreUnavailableError, SchemaError) as error:
            if time.monotonic() > deadline:
                raise (
                    error if isinstance(error, StoreUnavailableError) else StoreUnavailableError(str(error))
                ) from error
            time.sleep(PAUSE_S)
