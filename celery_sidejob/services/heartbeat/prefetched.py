"""What a worker has fetched and cannot begin yet: it vouches for the messages, for as long as it lives.

RabbitMQ shows nobody a message that a worker has prefetched, Redis does not say who has it, and it may wait behind a
long run for hours. Were it called missing, copies of it would pile up in the queue.
"""

from __future__ import annotations

import time
from typing import Any

from ...store.outbox import checks
from ...store.outbox.kinds import Kind
from ..duty import Report
from .deliveries import Deliveries
from .worker import Worker, WorkerDuty

SOON_S = 2.0
"""How long a delivery has waited, at most, when it is vouched for first."""


class Prefetched(WorkerDuty):
    """Moves the sweeper's next check of the messages that wait here, rows of this kind, to a lease from now.

    So a worker that dies, or is silent for its lease, vouches for nothing any more. Neither does one in which nothing
    has been running for a lease (`is_busy`): what waits there is not behind anything, the pool has lost it.
    """

    def __init__(self, worker: Worker, runs: Deliveries[Any], kind: Kind) -> None:
        super().__init__(worker)
        self._runs = runs
        self._kind = kind
        self._lease_s = self._runtime.settings.lease
        self._soon_s = min(SOON_S, self._runtime.settings.lost_after / 4)
        self._busy_at = time.monotonic()

    def _do(self, report: Report) -> None:
        if self._worker.is_busy():
            self._busy_at = time.monotonic()
        elif time.monotonic() - self._busy_at > self._lease_s:
            return
        keys = self._runs.waiting(for_s=self._soon_s, every_s=self._lease_s / 4)
        if keys:
            report["vouched"] += checks.vouch(self._connections, self._kind, keys, wait_s=self._lease_s)
