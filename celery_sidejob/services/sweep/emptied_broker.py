"""Notices that the broker was emptied, and has the lost messages published again, of each kind the oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...model.messages import GONE
from ...store.outbox import checks
from ...store.outbox.checks import CHECK_PAGE
from ...store.outbox.kinds import KINDS, Kind
from ..duty import Count, Report
from .sweep import Sweep, SweepDuty


class EmptiedBroker(SweepDuty):
    """Looks for our marker in the broker; without the marker, looks for all messages ever published there.

    A broker that no sweeper has seen yet also seems emptied, and may have all its messages.
    """

    interval_s = 3.0
    counts = (Count("broker_emptied", "The broker was found emptied, or new.", total="broker_emptied", kind=bool),)

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._sought: Sequence[Kind] = ()
        """The kinds whose messages are still to be looked for: the broker tells only once that it was emptied."""

    def is_due(self) -> bool:
        """Tell whether it is time to look for the marker, or the last look for all messages is unfinished."""
        return self._runtime.broker.ready and (bool(self._sought) or super().is_due())

    def _do(self, report: Report) -> None:
        broker, stores = self._runtime.broker, self._runtime.stores
        if not self._sought and broker.was_emptied(stores.label_of(self._runtime.store)):
            self._sought = KINDS
        if self._sought:
            report["broker_emptied"] += 1
            self._sought = [kind for kind in self._sought if not self._sweep.backlog.look_for_all(kind)]


class VanishedQueues(SweepDuty):
    """Asks the broker, where it can answer, for each queue that should have messages of jobs.

    Publishes again the messages of a queue that is gone; publishing declares the queue.
    """

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
