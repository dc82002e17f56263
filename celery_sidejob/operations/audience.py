"""What this process knows of listeners and of tracked jobs. It asks the store at most once a second, if it must."""

from __future__ import annotations

from time import monotonic
from typing import Any

from ..model.errors import SchemaError, StoreUnavailableError
from ..store import audience, jobs
from ..store.connection.connections import Connections

KNOWN_S = 1.0
"""Seconds for which an answer is valid. `subscribe` returns only when all older answers are no longer valid."""


class Audience:
    """Knows whether a port subscribes to the log, and whether a client listens by NOTIFY; any thread may ask.

    One answer covers both. The claim of a run asks the same question within its own statement.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._keeps_log = False
        self._listens = False
        self._until = self._changed_at = float("-inf")

    def keeps_log(self, *, ask: bool = True) -> bool:
        """Tell whether a port keeps the log's entries; without `ask` as last known."""
        if ask and self.to_ask:
            self._ask()
        return self._keeps_log

    def listens(self, *, ask: bool = True) -> bool:
        """Tell whether a client listens by NOTIFY; without `ask` as last known."""
        if ask and self.to_ask:
            self._ask()
        return self._listens

    @property
    def known(self) -> tuple[bool, bool, float]:
        """The last answer, and its validity by `time.monotonic`, for `hear` in another process of this machine."""
        return self._keeps_log, self._listens, self._until

    def hear(self, known: tuple[bool, bool, float]) -> None:
        """Take over the answer of another process of this machine, if that is valid for longer."""
        if known[2] > self._until and known[2] - KNOWN_S > self._changed_at:
            self._keeps_log, self._listens, self._until = known

    @property
    def to_ask(self) -> str | None:
        """The schema in which to ask for listeners; None while the answer is known."""
        return self._connections.schema if monotonic() >= self._until else None

    def learn(self, row: Any, asked_at: float) -> None:
        """Take the answer of a statement that began at this time of `time.monotonic`; ignored if it did not ask."""
        if row.keeps_log is not None:
            self._keeps_log, self._listens = row.keeps_log, row.listens
            if asked_at > self._changed_at:
                self._until = asked_at + KNOWN_S

    def has_changed(self) -> None:
        """Ask again at the next use: this process has made a port subscribe to the log."""
        self._changed_at = monotonic()
        self._until = float("-inf")

    def _ask(self) -> None:
        """Ask the store. An unreachable store is not asked again at each write: it counts as having no listeners.

        Another thread asks too in the meantime, because the answer that it would find may be too old.
        """
        asked_at = monotonic()
        try:
            row = self._connections.read(lambda executor: audience.ask(executor, self._connections.schema))
        except (StoreUnavailableError, SchemaError):
            self._keeps_log = self._listens = False
            self._until = monotonic() + KNOWN_S  # the failure itself may have taken longer than an answer is valid
        else:
            self.learn(row, asked_at)


class Tracking:
    """Knows the tracked jobs; any thread may ask."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._ids: frozenset[int] = frozenset()
        self._before: frozenset[int] = frozenset()
        self._until = float("-inf")
        self._changes = 0

    def follows(self, job_id: int) -> bool:
        """Tell whether a job is tracked, or was until a moment ago; False if the store is unreachable.

        The announced change happened before this question, and the job may have been deleted since.
        """
        if monotonic() >= self._until:
            changes = self._changes
            try:
                self._before, self._ids = self._ids, self._connections.read(jobs.tracked_ids)
            except (StoreUnavailableError, SchemaError):
                self._before = self._ids = frozenset()
            if changes == self._changes:
                self._until = monotonic() + KNOWN_S
        return job_id in self._ids or job_id in self._before

    def has_changed(self) -> None:
        """Ask again at the next use: this process has tracked a job, or ceased to."""
        self._changes += 1
        self._until = float("-inf")
