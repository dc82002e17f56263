"""Where an app's results are: a schema of a database, which all of this process's threads reach in one way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from math import inf
from time import monotonic
from typing import Any, TypeVar

from celery import Celery

from ..model import native, urls
from ..model.checks import shown
from ..model.errors import SettingsError, StoreUnavailableError
from ..model.urls import SCHEME, is_alone
from ..store import chords, results
from ..store.chords import Owed, Part
from ..store.connection.bounded import forget_in_children
from ..store.connection.connections import Connections
from ..store.connection.opening import Opener
from ..store.connection.own_executor import OwnExecutor, OwnTransaction
from .waiting import Ear

T = TypeVar("T")

SETTING = "result_backend"
OPTIONS = "result_backend_transport_options"
APPLICATION = "celery_sidejob_results"
"""The name of the sessions that listen in `pg_stat_activity`."""

APART_S = 0.001
"""A process notifies at most once in this time; further results are named by its next notification.

A listener that is notified looks again `waiting.BACK_OFF_S[0]` later, for results of a process that had no more after
them; one that is notified of others' results alone looks `waiting.DEAF_S` later.
"""
READERS = 4
"""The most threads of a process that read at once: thousands may begin to wait together, and each would have a session.
"""


class Place:
    """Keeps results, and notifies those that wait for them."""

    def __init__(self, connections: Connections, ear: Ear) -> None:
        self.connections = connections
        self.schema = connections.schema
        self.ear = ear
        forget_in_children(self)
        self.forget()

    def forget(self) -> None:
        """After a fork, forget what the parent has not told yet."""
        self._lock = native.lock()  # the real thread that writes the ends of runs tells too
        self._readers = threading.Semaphore(READERS)
        self._untold: list[str] = []
        self._told_at = 0.0

    def do(self, name: str, work: Callable[[OwnExecutor], T]) -> T:
        """Run one statement; raises StoreUnavailableError."""
        return self.connections.transact(name, work, single=True)

    def keep(self, result: results.Kept, *, replaces: bool = False) -> None:
        """Keep a result, and notify those that wait; raises StoreUnavailableError."""
        if self.do("result", lambda executor: results.keep(executor, result, replaces=replaces)):
            self.tell(result.key)

    def read(self, keys: list[str], *, until: float = inf) -> dict[str, bytes]:
        """Read what is kept under some keys; raises StoreUnavailableError, also if there is no answer `until` then."""
        found: dict[str, bytes] = {}
        for page in results.pages(keys):
            readers, left_s = self._readers, None if until == inf else max(0.0, until - monotonic())
            if not readers.acquire(timeout=left_s and min(left_s, threading.TIMEOUT_MAX)):
                raise StoreUnavailableError("Others wait for Postgres, and had no answer in time.")
            try:
                left_s = left_s if left_s is None else max(0.0, until - monotonic())
                found.update(self.connections.read(partial(results.read, keys=page), within_s=left_s))
            finally:
                readers.release()
        return found

    # -- chords ----------------------------------------------------------------------------------------------------

    def count(self, part: Part, result: results.Kept | None) -> Owed | None:
        """Count a part with its task's result, and return its chord if this process must send the body now."""
        owed, is_listened = self.do("chord-part", lambda executor: chords.count(executor, part, result))
        if is_listened and result is not None:
            self.tell(result.key)
        return owed

    def forget_chord(self, owed: Owed, *, with_: Callable[[OwnTransaction], Any] | None = None) -> None:
        """Forget a chord; `with_` sends its body in the same commit. Does nothing if the claim is lost.

        If the process dies before the commit, the sweeper sends the body.
        """

        def work(executor: OwnExecutor) -> OwnTransaction | None:
            if not chords.remove(executor, owed) or with_ is None:
                return None
            lent = OwnTransaction(executor, self.schema)
            with_(lent)
            return lent

        lent = self.connections.transact("chord-body", work, single=with_ is None)
        if lent is not None:
            lent.committed()

    def prune(self) -> None:
        """Remove all expired results, a page in each transaction; raises StoreUnavailableError."""
        while results.prune(self.connections):
            pass
        while chords.prune(self.connections):
            pass

    def tell(self, key: str) -> None:
        """Notify now, or with the next result; those that wait look for themselves if a notification is lost."""
        with self._lock:
            self._untold.append(key)
            if monotonic() - self._told_at < APART_S:
                return
            keys, self._untold = self._untold, []
            self._told_at = monotonic()
        try:
            self.do("tell", lambda executor: results.tell(executor, keys))
        except StoreUnavailableError:
            pass
        finally:
            self._told_at = monotonic()


_stores: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()
"""By the id of the connections to a store, which are an app's own: by them the end of a task knows its results."""
_lock = threading.Lock()


def place_of(app: Celery, url: str, options: Mapping[str, Any]) -> Place:
    """Return the place that a URL names: the app's store, if the URL names no database.

    Raises SettingsError if the URL or an option cannot be read, or if the app has no store.
    """
    schema, direct_url = _checked(options)
    if not is_alone(url):
        if not urls.are_clear_for_broker(url):
            raise SettingsError(f"{SETTING} cannot be read: {urls.NOT_CLEAR}")
        with _lock:
            return _named(f"postgresql://{url.partition('://')[2]}", direct_url, schema)
    sidejob = getattr(app, "sidejob", None)
    if sidejob is None:
        raise SettingsError(ALONE)
    settings, connections = sidejob.settings, sidejob.runtime.connections
    with _lock:
        place = _stores.get(id(connections))
        if place is None:
            ear = _ear(settings.database_url, settings.direct_url, settings.schema)
            place = _stores[id(connections)] = Place(connections, ear)
        return place


@cache
def _named(url: str, direct_url: str | None, schema: str) -> Place:
    """Return the one place of this process in a database; `direct_url` leads past a proxy that pools transactions."""
    connections = Connections(url, schema, prepare=direct_url is None, setting=SETTING)
    return Place(connections, _ear(url, direct_url, schema))


@cache
def _ear(url: str | None, direct_url: str | None, schema: str) -> Ear:
    """Return the one that listens there for all apps of this process."""
    setting = SETTING if direct_url is None else "sidejob_direct_url"
    return Ear(Opener(direct_url or url, schema, setting=setting, application=APPLICATION), schema)


def _checked(options: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the schema and the direct URL of a named database."""
    schema, direct_url = options.get("schema", "sidejob"), options.get("direct_url")
    for name, value in (("schema", schema), ("direct_url", direct_url)):
        if value is not None and (not isinstance(value, str) or not value):
            raise SettingsError(f"{OPTIONS}[{name!r}] is a text, not {shown(value)}.")
    return schema, direct_url


ALONE = (
    f"{SETTING} is {SCHEME}:// alone, for the store of the app's SideJob, and this app has none: call SideJob(app) and "
    f"set sidejob_database_url, or name the database: {SCHEME}://user:password@host:5432/database."
)
