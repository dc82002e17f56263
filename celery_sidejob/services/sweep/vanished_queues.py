"""Publishes again the messages of a queue that is gone; publishing declares the queue."""

from __future__ import annotations

from ...model.messages import GONE
from ...store.outbox import checks
from ...store.outbox.checks import CHECK_PAGE
from ...store.statement import Transaction
from ..duty import Report
from .sweep import SweepDuty


class VanishedQueues(SweepDuty):
    """Asks the broker, where it can answer, for each queue that should have messages of jobs."""

    interval_s = 3.0

    def is_due(self) -> bool:
        """Tell whether it is time, and the broker answers."""
        return self._runtime.broker.ready and self._runtime.broker.knows_queues and super().is_due()

    def _do(self, report: Report) -> None:
        broker = self._runtime.broker
        for queue in checks.queues_in_broker(self._connections):
            if broker.ready_messages(queue) != GONE:
                continue

            def work(executor: Transaction, queue: str = queue) -> int:
                return checks.republish_in(executor, queue)

            while self._connections.transact("check-now", work) == CHECK_PAGE:
                pass
