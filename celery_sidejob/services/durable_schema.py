"""Whether a store's schema has what durable tasks need: it may be older, and upgraded while we run."""

from __future__ import annotations

from ..store.connection.connections import Connections
from ..store.outbox import tasks


class DurableSchema:
    """Asks the store until it has; then it is not asked again."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._fits = False

    def fits(self) -> bool:
        """Tell whether it has what durable tasks need."""
        if not self._fits:
            self._fits = tasks.fits(self._connections)
        return self._fits
