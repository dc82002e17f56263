"""What a worker has fetched and cannot begin yet: it vouches for the messages, for as long as it lives.

RabbitMQ shows nobody a message that a worker has prefetched, Redis does not say who has it, and it may wait behind a
long run for hours. Were it called missing, copies of it would pile up in the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic

from ..operations.runtime import Runtime
from .runs_here import K, RunsHere

SOON_S = 2.0
"""How long a delivery has waited, at most, when it is vouched for first."""


class WaitingRuns(Generic[K]):
    """Moves the sweeper's next look at the messages that wait here: by `still_wait` of the store, to a lease from now.

    So a worker that dies, or is silent for its lease, vouches for nothing any more. Neither does one in which nothing
    has been running for a lease (`is_busy`): what waits there is not behind anything, the pool has lost it.
    """

    def __init__(
        self, runtime: Runtime, runs: RunsHere[K], still_wait: Callable[..., int],
        is_busy: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._connections = runtime.connections
        self._runs = runs
        self._still_wait = still_wait
        self._is_busy = is_busy
        self._lease_s = runtime.settings.lease
        self._soon_s = min(SOON_S, runtime.settings.lost_after / 4)
        self._busy_at = time.monotonic()

    def vouch(self) -> int:
        """Tell the store of what waits, all in one statement, and return of how many messages it moved the look."""
        if self._is_busy():
            self._busy_at = time.monotonic()
        elif time.monotonic() - self._busy_at > self._lease_s:
            return 0
        keys = self._runs.waiting(for_s=self._soon_s, every_s=self._lease_s / 4)
        return self._still_wait(self._connections, keys, wait_s=self._lease_s) if keys else 0
