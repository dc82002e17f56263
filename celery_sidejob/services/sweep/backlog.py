"""Tells messages that wait in the broker, however long the backlog is, from messages that are missing.

One copy of a message is harmless, but copies of a whole backlog double it. Before a silent message counts as missing,
the sweeper looks into the broker, outside any transaction. In Redis it looks for each message
(`hooks/broker/redis_look.py`). RabbitMQ shows no messages, and they are counted. If the broker cannot answer, only the
time since the publication decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from ...model.broker_view import Look, Sight, Sought
from ...operations.runtime import Runtime
from ...store.outbox import checks
from ...store.outbox.checks import CHECK_PAGE, OVERTAKEN_S
from ...store.outbox.kinds import TASKS, Kind

FRONT_S = 300.0
REST_S = 3600.0
"""Seconds until a waiting message is checked again, at the latest: one near the front of its queue, and any other."""
UNREAD_S = 5.0
BORDER = 50
"""How many of the messages read last show when their part of the queue was published: the earliest decides."""


class Backlog:
    """Tells waiting messages from missing ones; looks into each queue once in a turn of the sweeper."""

    def __init__(self, runtime: Runtime, may_go_on: Callable[[], bool]) -> None:
        self._runtime = runtime
        self._may_go_on = may_go_on
        self._counted = False
        self._look: Look | None = None
        self._borders: dict[str, datetime | None] = {}
        self._whole: dict[str, bool] = {}

    def begin_turn(self) -> None:
        """Forget the results of the last turn."""
        self._counted = False
        self._look = self._runtime.broker.look()
        self._borders.clear()
        self._whole.clear()

    def pass_over_counted(self) -> bool:
        """Postpone the check of overdue messages in queues with at least as many messages ready; tell whether any were.

        A message that is lost while others wait is called missing once later messages have overtaken it.
        """
        if self._counted or not self._runtime.broker.knows_queues:
            return False
        self._counted = True
        passed_over = 0
        for queue, number in checks.overdue(self._runtime.connections, limit=CHECK_PAGE).items():
            ready = self._runtime.broker.ready_messages(queue)
            if ready is None or ready < number:
                continue
            postpone = partial(checks.postpone_in, queue=queue)
            passed = CHECK_PAGE
            while passed == CHECK_PAGE and self._may_go_on():
                passed = self._runtime.connections.transact("pass-over", postpone)
                passed_over += passed
        return bool(passed_over)

    def is_whole(self, queue: str) -> bool:
        """Tell whether a queue of RabbitMQ has nearly all the messages that it should have: then it was not emptied.

        A tenth may be missing, because workers may be fetching just now. A message lost all the same is found missing
        later, by the usual checks.
        """
        if queue not in self._whole:
            ready = self._runtime.broker.ready_messages(queue)
            limit = 1 + max(0, ready or 0) * 10 // 9
            self._whole[queue] = (
                ready is not None and checks.in_queue(self._runtime.connections, queue, limit=limit) < limit
            )
        return self._whole[queue]

    def look_for_all(self, kind: Kind) -> bool:
        """Publish again the rows of one kind whose messages should be in the broker and are not.

        False if this must be repeated: the broker does not answer, or another worker sweeps.
        """
        self.begin_turn()  # earlier looks say nothing about the rows read now
        after, seen_at = kind.lowest, None
        while page := checks.in_broker(self._runtime.connections, kind, after=after):
            after, seen_at = page[-1].key, seen_at or page[0].read_at
            lost = [row for row in page if not self.is_whole(row.queue)]
            gone = self.without_what_waits(lost, kind) if self._may_go_on() else None
            if gone is None:
                return False
            republish = partial(checks.republish, kind=kind, task_ids=gone, seen_at=seen_at)
            self._runtime.connections.transact("check-now", republish, single=True)
        return True

    def without_what_waits(self, rows: Sequence[Any], kind: Kind) -> list[str] | None:
        """Return the task ids of due rows whose messages are not in the broker; postpone the check of the others.

        None if the broker does not answer just now: then nothing could be published either.
        """
        if kind is TASKS:
            sought = [Sought.of_row(row) for row in rows if row.publication is not None]
        else:
            sought = [Sought.of_job(row) for row in rows]
        sight = self._look.find(sought) if self._look is not None and sought else Sight()
        if sight is None and not self._runtime.broker.ready:
            return None
        sight = sight or Sight()
        published_at = {row.task_id: row.published_at for row in rows}
        borders = {queue: self._border(queue, last) for queue, last in sight.last.items()}
        behind = {  # a message that is not marked may have been lost before its mark was written
            task_id for task_id, queue in sight.behind.items()
            if (border := borders[queue]) is not None and (since := published_at[task_id]) is not None
            and since > border
        }  # fmt: skip
        self._pass_over(sight.there, FRONT_S)
        self._pass_over(behind, REST_S)
        self._pass_over(sight.unread, UNREAD_S, are_there=False)
        return [row.task_id for row in rows if row.task_id not in sight.there | behind | sight.unread]

    def _border(self, queue: str, last: Sequence[str]) -> datetime | None:
        """Return a time after which the rest of a queue was published; None if no row of the messages read is found.

        The earliest of several times counts: a message marked late, or published twice, has a time that is too late.
        """
        if queue not in self._borders:
            known = checks.published_at(self._runtime.connections, last)
            latest = [known[task_id] for task_id in last if task_id in known][-BORDER:]
            self._borders[queue] = min(latest) - timedelta(seconds=OVERTAKEN_S) if latest else None
        return self._borders[queue]

    def _pass_over(self, task_ids: Collection[str], longest_s: float, *, are_there: bool = True) -> None:
        if task_ids:
            postpone = partial(checks.postpone, task_ids=task_ids, longest_s=longest_s, are_there=are_there)
            self._runtime.connections.transact("pass-over", postpone, single=True)
