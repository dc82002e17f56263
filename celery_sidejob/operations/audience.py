"""Whether anybody listens, as far as this process knows. It asks the store only if it must, once a second at most."""

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
        self._changes = 0

    def keeps_log(self, *, ask: bool = True) -> bool:
        """Tell whether the log's entries are kept by a port; without `ask` what was known last."""
        if ask and monotonic() >= self._log_until:
            changes = self._changes
            until = self._ask()
            if changes == self._changes:
                self._log_until = until
        return self._keeps_log

    def listens(self, *, ask: bool = True) -> bool:
        """Tell whether a client listens by NOTIFY; without `ask` what was known last."""
        if ask and monotonic() >= self._listens_until:
            self._ask()
        return self._listens

    def has_changed(self) -> None:
        """Ask anew at the next use: this process has made a port subscribe to the log."""
        self._changes += 1
        self._log_until = float("-inf")

    def _ask(self) -> float:
        """Ask the store, and return until when the answer counts.

        A store that is away is not asked again at each write: its answer is that nobody is there. Another thread that
        comes meanwhile asks too, because the answer that it would find may be too old.
        """
        until = monotonic() + KNOWN_S
        try:
            row = self._connections.read(lambda executor: audience.ask(executor, self._connections.schema))
        except (StoreUnavailableError, SchemaError):
            self._keeps_log = self._listens = False
            until = monotonic() + KNOWN_S  # to find that out may have taken longer than an answer counts
        else:
            self._keeps_log, self._listens = row.keeps_log, row.listens
        self._listens_until = until
        return until
