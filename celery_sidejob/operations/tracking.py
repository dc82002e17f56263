"""Which jobs are tracked, as far as this process knows: it asks at most once a second, and only if it has listeners."""

from __future__ import annotations

from time import monotonic

from ..model.errors import SchemaError, StoreUnavailableError
from ..store import tracked
from ..store.connection.connections import Connections

KNOWN_S = 1.0
"""Seconds for which an answer counts. Another process may have tracked a job meanwhile."""


class Tracking:
    """Knows the tracked jobs; any thread may ask."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._ids: frozenset[int] = frozenset()
        self._before: frozenset[int] = frozenset()
        self._until = float("-inf")
        self._changes = 0

    def follows(self, job_id: int) -> bool:
        """Tell whether a job is tracked, or was until a moment ago; of a store that is away nothing is known.

        What is announced happened before the question, and the job may have been deleted since.
        """
        if monotonic() >= self._until:
            changes = self._changes
            try:
                self._before, self._ids = self._ids, self._connections.read(tracked.ids)
            except (StoreUnavailableError, SchemaError):
                self._before = self._ids = frozenset()
            if changes == self._changes:
                self._until = monotonic() + KNOWN_S
        return job_id in self._ids or job_id in self._before

    def has_changed(self) -> None:
        """Ask anew at the next use: this process has tracked a job, or ceased to."""
        self._changes += 1
        self._until = float("-inf")
