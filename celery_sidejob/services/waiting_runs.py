"""What a worker has fetched and cannot begin yet: it vouches for the messages, for as long as it lives.

RabbitMQ shows nobody a message that a worker has prefetched, and it may wait behind a long run for hours. Were it
called missing, copies of it would pile up in the queue.
"""

from __future__ import annotations

from ..operations.runtime import Runtime
from ..store import messages
from .runs_here import Key, RunsHere

SOON_S = 2.0
"""How long a delivery has waited, at most, when it is vouched for first."""


class WaitingRuns:
    """Moves forward when the sweeper looks at the messages that wait here: at most a lease from now.

    So a worker that dies, or is silent for its lease, vouches for nothing any more.
    """

    def __init__(self, runtime: Runtime, runs: RunsHere[Key]) -> None:
        self._runtime = runtime
        self._runs = runs
        self._lease_s = runtime.settings.lease
        self._soon_s = min(SOON_S, runtime.settings.lost_after / 4)

    def vouch(self) -> int:
        """Tell the store of what waits, all in one statement, and return how many messages would soon be looked at."""
        keys = self._runs.waiting(for_s=self._soon_s, every_s=self._lease_s / 4)
        if not keys:
            return 0
        return messages.still_wait(self._runtime.connections, keys, wait_s=self._lease_s)
