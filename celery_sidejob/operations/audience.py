"""Whether anybody listens, as far as this process knows. It asks the store only if it must, once a second at most."""

from __future__ import annotations

from time import monotonic
from typing import Any

from ..model.errors import SchemaError, StoreUnavailableError
from ..store import audience
from ..store.connection.connections import Connections

KNOWN_S = 1.0
"""Seconds for which an answer counts. `subscribe` returns only when every older answer has lost its validity."""


class Audience:
    """Knows whether a port subscribes to the log, and whether a client listens by NOTIFY; any thread may ask.

    One answer tells both. The claim of a run asks along with its own statement.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._keeps_log = False
        self._listens = False
        self._until = self._changed_at = float("-inf")

    def keeps_log(self, *, ask: bool = True) -> bool:
        """Tell whether the log's entries are kept by a port; without `ask` what was known last."""
        if ask and self.to_ask:
            self._ask()
        return self._keeps_log

    def listens(self, *, ask: bool = True) -> bool:
        """Tell whether a client listens by NOTIFY; without `ask` what was known last."""
        if ask and self.to_ask:
            self._ask()
        return self._listens

    @property
    def known(self) -> tuple[bool, bool, float]:
        """What is known, and until when, by `time.monotonic`: for another process of this machine to `hear`."""
        return self._keeps_log, self._listens, self._until

    def hear(self, known: tuple[bool, bool, float]) -> None:
        """Take what another process of this machine knows, if that counts for longer."""
        if known[2] > self._until and known[2] - KNOWN_S > self._changed_at:
            self._keeps_log, self._listens, self._until = known

    @property
    def to_ask(self) -> str | None:
        """The schema in which it is to be asked who listens; None while that is known."""
        return self._connections.schema if monotonic() >= self._until else None

    def learn(self, row: Any, asked_at: float) -> None:
        """Take the answer of a statement that was begun at this time of `time.monotonic`; none, if it did not ask."""
        if row.keeps_log is not None:
            self._keeps_log, self._listens = row.keeps_log, row.listens
            if asked_at > self._changed_at:
                self._until = asked_at + KNOWN_S

    def has_changed(self) -> None:
        """Ask anew at the next use: this process has made a port subscribe to the log."""
        self._changed_at = monotonic()
        self._until = float("-inf")

    def _ask(self) -> None:
        """Ask the store. A store that is away is not asked again at each write: its answer is that nobody is there.

        Another thread that comes meanwhile asks too, because the answer that it would find may be too old.
        """
        asked_at = monotonic()
        try:
            row = self._connections.read(lambda executor: audience.ask(executor, self._connections.schema))
        except (StoreUnavailableError, SchemaError):
            self._keeps_log = self._listens = False
            self._until = monotonic() + KNOWN_S  # to find that out may have taken longer than an answer counts
        else:
            self.learn(row, asked_at)
