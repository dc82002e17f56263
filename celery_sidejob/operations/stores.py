"""The stores of durable tasks: the primary, which has the jobs too, and those that follow when it is away."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..model import native
from ..model.errors import SchemaError, SettingsError, StoreUnavailableError
from ..store import registry

if TYPE_CHECKING:
    from .runtime import Runtime

logger = logging.getLogger("celery_sidejob")

NAME_LENGTH = 8
WAIT_S = 3.0
"""How long a caller waits for a store where there is another one to go to."""
LONGEST_WAIT_S = 10.0
"""How long where there is none: as long as it takes to find out that a connection is cut off."""
PAUSE_S = (5.0, 15.0)
"""After a failure callers of this process leave the store alone for a random time between these."""
SLOW_S = 1.0
"""A store that fails sooner than this, and has no other after it, is tried by each call."""


class Stores:
    """What one process knows of its stores: their names, and which of them did not answer a moment ago.

    A store's name is the beginning of its schema's random identity, because its URL may differ from one machine to
    another. It stands in messages, and in the ids of entries of the dead set.
    """

    def __init__(self) -> None:
        self._all: list[Runtime] = []
        self._names: dict[int, str] = {}
        self._left_alone_until: dict[int, float] = {}
        self._failure = ""
        self._lock = native.lock()

    def add(self, runtime: Runtime) -> None:
        """Have another store follow; the first is the primary."""
        self._all.append(runtime)

    def __iter__(self) -> Iterator[Runtime]:
        return iter(self._all)

    def __getitem__(self, place: int) -> Runtime:
        return self._all[place]

    def __len__(self) -> int:
        return len(self._all)

    @property
    def several(self) -> bool:
        """Whether a row may be elsewhere than in the primary."""
        return len(self._all) > 1

    def others(self, runtime: Runtime) -> Iterator[Runtime]:
        """Return the stores but one."""
        return (store for store in self._all if store.place != runtime.place)

    # -- names ---------------------------------------------------------------------------------------------------

    def name_of(self, runtime: Runtime) -> str:
        """Return the name of a store, which is asked for it once; StoreUnavailableError if it does not answer."""
        name = self._names.get(runtime.place)
        if name is None:
            identity = runtime.connections.read(registry.identity, within_s=self.wait_s)
            if identity is None:
                raise SchemaError(
                    f"Schema {runtime.connections.schema!r} of {runtime.where} has no name yet. "
                    "Run `celery -A <app> sidejob db upgrade`."
                )
            name = identity[:NAME_LENGTH]
            with self._lock:
                self._check_name(runtime, name)
                self._names[runtime.place] = name
        return name

    def label_of(self, runtime: Runtime) -> str | None:
        """Return what a store is called where people read it: its name, None for the primary."""
        return self.name_of(runtime) if runtime.place else None

    def named(self, name: str) -> Runtime:
        """Return the store of this name.

        Raises StoreUnavailableError if it may be one that does not answer, SettingsError if there is none.
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

    def _check_name(self, runtime: Runtime, name: str) -> None:
        for place, known in self._names.items():
            if known == name and place != runtime.place:
                raise SettingsError(
                    f"{runtime.where} and {self._all[place].where} are the same store, or one is a copy of the other "
                    f"(schema {runtime.connections.schema!r}, {name}). Each store must be a database of its own; of a "
                    "copy, remove the row 'identity' of its table meta and run `celery -A <app> sidejob db upgrade`."
                )

    # -- which of them answer ------------------------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """How long a caller waits for an answer."""
        return WAIT_S if self.several else LONGEST_WAIT_S

    def look_s(self, runtime: Runtime) -> float:
        """How long a command or a monitor waits for what a store tells: of the primary there is more to tell."""
        return self.wait_s if runtime.place else LONGEST_WAIT_S

    def is_left_alone(self, runtime: Runtime) -> bool:
        """Whether the pause after a store's last failure is not over."""
        return time.monotonic() < self._left_alone_until.get(runtime.place, float("-inf"))

    @property
    def any_left_alone(self) -> bool:
        """Whether some store did not answer a moment ago."""
        return any(self.is_left_alone(store) for store in self._all)

    def failed(self, runtime: Runtime, error: Exception, *, after_s: float = SLOW_S) -> None:
        """Leave a store alone for a while that has just failed, `after_s` seconds after it was asked."""
        self._failure = str(error)
        if not self.several and after_s < SLOW_S:
            return
        pause_s = random.uniform(*PAUSE_S)
        self._left_alone_until[runtime.place] = time.monotonic() + pause_s
        logger.warning("%s is left alone for %.0f s: %s", runtime.where, pause_s, error)

    def answered(self, runtime: Runtime) -> None:
        """Leave a store alone no longer."""
        self._left_alone_until.pop(runtime.place, None)

    def all_left_alone(self) -> StoreUnavailableError:
        """Return what to tell a caller for whom no store was tried."""
        return StoreUnavailableError(f"No store has answered a moment ago, and none is asked just now: {self._failure}")
