"""Messages that a worker has fetched and cannot begin yet: the worker vouches for them as long as it lives.

RabbitMQ hides prefetched messages, and Redis does not say who has one. A message may wait for hours behind a long run.
If it were called missing, its copies would pile up in the queue.
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
"""Seconds that a delivery has waited, at most, when the worker first vouches for it."""


class Prefetched(WorkerDuty):
    """Postpones the sweeper's next check of the messages of one kind that wait here, to a lease from now.

    A worker that dies, or is silent for its lease, therefore stops vouching. A worker in which nothing has been running
    for a lease (`is_busy`) stops too: its messages do not wait behind a run, the pool has lost them.
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
