"""Publishes again the messages of a queue that is gone; publishing declares the queue."""

from __future__ import annotations

from functools import partial

from ...model.messages import GONE
from ...store.outbox import checks
from ...store.outbox.checks import CHECK_PAGE
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
            if broker.ready_messages(queue) == GONE:
                republish = partial(checks.republish_in, queue=queue)
                while self._connections.transact("check-now", republish) == CHECK_PAGE:
                    pass
