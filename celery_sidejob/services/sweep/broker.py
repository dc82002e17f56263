"""Notices messages that the broker has lost, and has them published again; dooms the tasks in its dead list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...model.errors import StoreUnavailableError
from ...model.logger import log_row_error
from ...model.messages import GONE, Buried, Cursor
from ...operations.ledger import burials
from ...store.outbox import publishing
from ...store.outbox.kinds import KINDS, Kind
from ...store.outbox.publishing import CHECK_PAGE
from ..duty import Count, Report
from .sweep import SweepDuty


class EmptiedBroker(SweepDuty):
    """Checks our marker in the broker; if it is gone, has all messages published again that were there.

    A broker that no sweeper has seen yet also seems emptied, and may have all its messages: they are counted first.
    """

    interval_s = 3.0
    counts = (Count("broker_emptied", "The broker was found emptied, or new.", total="broker_emptied", kind=bool),)

    _sought: Sequence[Kind] = ()
    """The kinds whose messages must still be searched: the broker reports only once that it was emptied."""

    def is_due(self) -> bool:
        """Tell whether it is time to check the marker, or the last search for all messages is unfinished."""
        return self._runtime.broker.ready and (bool(self._sought) or super().is_due())

    def _do(self, report: Report) -> None:
        if not self._sought and self._runtime.broker.was_emptied(self._runtime.label):
            self._sought = KINDS
        if self._sought:
            report["broker_emptied"] += 1
            self._sought = [kind for kind in self._sought if not self._sweep.backlog.look_for_all(kind)]


class VanishedQueues(SweepDuty):
    """Asks the broker, where it can answer, for each queue that should have messages of jobs.

    The messages of a queue that is gone are published again; publishing declares the queue.
    """

    interval_s = 3.0

    def is_due(self) -> bool:
        """Tell whether it is time, and the broker answers."""
        return self._runtime.broker.ready and self._runtime.broker.knows_queues and super().is_due()

    def _do(self, report: Report) -> None:
        broker = self._runtime.broker
        for queue in publishing.queues_in_broker(self._connections):
            if broker.ready_messages(queue) == GONE:
                republish = partial(publishing.republish_in, queue=queue)
                while self._connections.transact("check-now", republish) == CHECK_PAGE:
                    pass


class DeadList(SweepDuty):
    """Reads the transport's dead list to its end; tasks that are not durable stay there until a person decides.

    If the process dies before an entry is removed, the entry stays. The next sweeper then finds the row doomed, or in
    the dead set.
    """

    _cursor = Cursor()

    def _do(self, report: Report) -> None:
        broker = self._runtime.broker
        while self._may_publish():
            cursor, page = broker.buried(self._cursor)
            if not page:
                self._cursor = cursor
                return
            seen_to = [one.text for one in page if one.is_doorbell or self._poison(one)]
            if seen_to and not broker.forget_buried(seen_to):
                return
            self._cursor = cursor.past([one.text for one in page if one.text not in seen_to])

    def _poison(self, buried: Buried) -> bool:
        """Doom the row of a message if this store has it; tell whether it has or had the row."""
        if buried.key is None or not self._runtime.may_have(buried.store):
            return False
        try:
            return burials.poison(self._runtime, buried.key)
        except StoreUnavailableError:
            raise
        except Exception:  # the entries behind it must not wait
            text = "What the dead list of the transport has of task %.100r was left there"
            log_row_error(buried.key, text, buried.key[0])
            return False
