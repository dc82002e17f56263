"""What this process knows of those who listen. It asks by one statement, at most once a second, and if it matters."""

from __future__ import annotations

from time import monotonic

from ..model.errors import SchemaError, StoreUnavailableError
from ..store import audience
from ..store.connection.connections import Connections

KNOWN_S = 1.0
"""Seconds for which an answer counts. `subscribe` returns only when every older answer has lost its validity."""


class Audience:
    """Knows whether a port subscribes to the log, and whether a client listens by NOTIFY; any thread may ask.

    One statement answers both questions. But the answer about the log counts only from a question about the log: a
    process that has just begun to read and write knows a collector that was made a moment before.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._keeps_log = False
        self._listens = False
        self._log_until = self._listens_until = float("-inf")

    def keeps_log(self, *, ask: bool = True) -> bool:
        """Tell whether the log's entries are kept by a port; without `ask` what was known last."""
        now = monotonic()
        if ask and now >= self._log_until:
            self._log_until = self._listens_until = now + KNOWN_S
            self._ask()
        return self._keeps_log

    def listens(self, *, ask: bool = True) -> bool:
        """Tell whether a client listens by NOTIFY; without `ask` what was known last."""
        now = monotonic()
        if ask and now >= self._listens_until:
            self._listens_until = now + KNOWN_S
            self._ask()
        return self._listens

    def has_changed(self) -> None:
        """Ask anew at the next use: this process has made a port subscribe to the log."""
        self._log_until = float("-inf")

    def _ask(self) -> None:
        """Ask the store; one that is away is not asked again at each write: its answer is that nobody is there."""
        try:
            row = self._connections.read(lambda executor: audience.ask(executor, self._connections.schema))
        except (StoreUnavailableError, SchemaError):
            self._keeps_log = self._listens = False
        else:
            self._keeps_log, self._listens = row.keeps_log, row.listens
