"""The stores of durable tasks: the primary, which also has the jobs, and the stores used when it is unavailable."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..model import native
from ..model.errors import SchemaError, SettingsError, StoreUnavailableError
from ..model.logger import logger
from ..model.settings import Settings
from ..store import meta
from ..store.connection.connections import Connections
from ..store.connection.opening import connection_parameters
from ..store.errors import StoreDown

NAME_LENGTH = 8
WAIT_S = 3.0
"""Seconds that a caller waits for a store if there is another store to use."""
LONGEST_WAIT_S = 10.0
"""Seconds that it waits if there is no other: as long as it takes to notice that a connection is cut off."""
PAUSE_S = (5.0, 15.0)
"""After a failure, this process does not use the store for a random number of seconds between these two."""
SLOW_S = 1.0
"""If the last store fails sooner than this, each call still tries it."""


class Store:
    """A database with our rows, as this process knows it: how to reach it, and whether it answered lately."""

    def __init__(self, settings: Settings, connections: Connections, *, place: int = 0) -> None:
        self.settings = settings
        """The app's settings, with this store's own URLs."""
        self.connections = connections
        self.place = place
        """The store's position among the app's stores; 0 is the primary."""
        self.name: str | None = None
        """Its name; None until the store was asked for it."""
        self._left_alone_until = float("-inf")

    @property
    def where(self) -> str:
        """The setting that contains the store's URL: its description until its name is known."""
        return f"Store {self.place} of sidejob_failover_urls" if self.place else "The store of sidejob_database_url"

    def direct_url(self) -> tuple[str, str]:
        """Return the URL that bypasses a proxy which does not keep a session's locks, and the name of that setting."""
        if self.settings.direct_url is not None:
            return self.settings.direct_url, "sidejob_direct_url"
        return self.settings.require_database_url(), self.connections.setting

    def called(self, service: str) -> str:
        """Return the name of one of this store's services, for logs and threads."""
        return f"{service}-{self.place}" if self.place else service

    @property
    def is_left_alone(self) -> bool:
        """Whether the pause after its last failure is still in progress."""
        return time.monotonic() < self._left_alone_until

    def leave_alone(self, pause_s: float) -> None:
        """Begin a pause after a failure."""
        self._left_alone_until = time.monotonic() + pause_s

    def answered(self) -> None:
        """End the pause."""
        self._left_alone_until = float("-inf")


class Stores:
    """The stores of an app, the primary first.

    A store's name is the beginning of its schema's random identity, because its URL may differ between machines. The
    name appears in messages, and in the ids of entries of the dead set.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self._all = stores
        self.several = len(stores) > 1
        """Whether a row may be in another store than the primary."""
        self._failure = ""
        self._lock = native.lock()

    def __iter__(self) -> Iterator[Store]:
        return iter(self._all)

    def __getitem__(self, place: int) -> Store:
        return self._all[place]

    def __len__(self) -> int:
        return len(self._all)

    def others(self, store: Store) -> Iterator[Store]:
        """Yield all stores except this store."""
        return (other for other in self._all if other is not store)

    # -- names ---------------------------------------------------------------------------------------------------

    def name_of(self, store: Store) -> str:
        """Return the name of a store, which is read only once; StoreUnavailableError if the store does not answer."""
        if store.name is None:
            identity = store.connections.read(meta.identity, within_s=self.wait_s)
            if identity is None:
                raise SchemaError(
                    f"Schema {store.connections.schema!r} of {store.where} has no name yet. "
                    "Run `celery -A <app> sidejob db upgrade`."
                )
            name = identity[:NAME_LENGTH]
            with self._lock:
                self._check_name(store, name)
                store.name = name
        return store.name

    def label_of(self, store: Store) -> str | None:
        """Return the label of a store for people: its name, None for the primary."""
        return self.name_of(store) if store.place else None

    def named(self, name: str) -> Store:
        """Return the store of this name.

        Raises StoreUnavailableError if it may be a store that does not answer, SettingsError if there is none.
        """
        failure: StoreUnavailableError | None = None
        for store in self._all:
            try:
                if self.name_of(store) == name:
                    return store
            except StoreUnavailableError as error:
                failure = error
        if failure is not None:
            raise failure
        raise SettingsError(
            f"A row is in the store {name!r}, which this process does not know: name it in sidejob_failover_urls here "
            "too."
        )

    def _check_name(self, store: Store, name: str) -> None:
        for other in self.others(store):
            if other.name == name:
                raise SettingsError(
                    f"{store.where} and {other.where} are the same store, or one is a copy of the other "
                    f"(schema {store.connections.schema!r}, {name}). Each store must be a database of its own; of a "
                    "copy, remove the row 'identity' of its table meta and run `celery -A <app> sidejob db upgrade`."
                )

    # -- availability --------------------------------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """Seconds that a caller waits for an answer."""
        return WAIT_S if self.several else LONGEST_WAIT_S

    def look_s(self, store: Store) -> float:
        """Seconds that a command or a monitor waits for a store's data: the primary has more to report."""
        return self.wait_s if store.place else LONGEST_WAIT_S

    @property
    def any_left_alone(self) -> bool:
        """Whether some store did not answer lately."""
        return any(store.is_left_alone for store in self._all)

    @contextmanager
    def trying(self, store: Store) -> Iterator[None]:
        """If a store proves to be unavailable, pause its use; a store with a locked row has answered."""
        began = time.monotonic()
        try:
            yield
        except StoreDown as error:
            self.failed(store, error, after_s=time.monotonic() - began)
            raise

    @contextmanager
    def asking(self, store: Store) -> Iterator[None]:
        """Do the same for a store whose answer is not needed: StoreUnavailableError if it did not answer lately."""
        if store.is_left_alone:
            raise StoreUnavailableError(f"{store.where} has not answered a moment ago, and is not asked just now")
        with self.trying(store):
            yield

    def failed(self, store: Store, error: Exception, *, after_s: float = SLOW_S) -> None:
        """Pause the use of a store that has just failed, `after_s` seconds after it was asked."""
        self._failure = str(error)
        if not self.several and after_s < SLOW_S:
            return
        pause_s = random.uniform(*PAUSE_S)
        store.leave_alone(pause_s)
        logger.warning("%s is left alone for %.0f s: %s", store.where, pause_s, error)

    def all_left_alone(self) -> StoreDown:
        """Return the error for a caller for which no store was tried."""
        return StoreDown(f"No store has answered a moment ago, and none is asked just now: {self._failure}")


def stores_of(settings: Settings, connections: Connections, *, longest_pause_s: float) -> Stores:
    """Return an app's stores: the primary, which has these connections, and those of `sidejob_failover_urls`."""
    found = [Store(settings, connections)]
    for place, url in enumerate(settings.failover_urls, 1):
        connection_parameters(url, setting="sidejob_failover_urls")  # raises SettingsError for a bad URL
        own = replace(settings, database_url=url, direct_url=None, failover_urls=())
        further = Connections(url, settings.schema, longest_pause_s=longest_pause_s, setting="sidejob_failover_urls")
        found.append(Store(own, further, place=place))
    return Stores(found)
