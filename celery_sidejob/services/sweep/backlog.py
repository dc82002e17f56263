"""Tells silent messages that are to be published again from those that wait in the broker, and bounds the copies.

A copy of a message is harmless, because only one delivery begins the run; but copies of a whole backlog are a second
backlog. No broker can be asked for a single message, so messages are counted, outside any transaction: a queue of the
broker should have at least as many as are silent. As many copies are published as it has too few. If it has enough, a
message may be lost all the same, and another wait in its place: it is published again if it was overtaken, since a
queue is served in order, or if it has waited for an hour. In a queue with several priorities these may be all that
wait, so such copies are limited.

If the broker cannot be counted, only the time since the publication decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from ...model.messages import GONE
from ...operations.runtime import Runtime
from ...store.outbox import publishing, references
from ...store.outbox.kinds import Kind

COPIES, COPIES_S = 10, 10.0
"""Copies that a queue gets in so many seconds, at most, while the broker has as many messages as are silent."""
MANY = 100_000
"""Missing messages that are counted at once. A queue of twice as many counts as one that has enough."""


class Backlog:
    """Tells waiting messages from missing ones; counts each queue once in a turn of the sweeper."""

    def __init__(self, runtime: Runtime, may_go_on: Callable[[], bool]) -> None:
        self._runtime = runtime
        self._may_go_on = may_go_on
        self._connections = runtime.connections
        self._queues: dict[str, Queue] = {}
        self._counted: set[str] = set()
        """The queues that were counted in this turn."""

    def begin_turn(self) -> None:
        """Forget the counts of the last turn."""
        self._counted.clear()

    def look_for_all(self, kind: Kind) -> bool:
        """Publish again the rows of one kind whose messages should be in the broker, but for queues that have them.

        False if this must be repeated: the broker does not answer, or another worker sweeps.
        """
        whole: dict[str, bool] = {}
        after, seen_at = kind.lowest, None
        while page := publishing.in_broker(self._connections, kind, after=after):
            after, seen_at = page[-1].key, seen_at or page[0].read_at
            whole.update((queue, self._is_whole(queue)) for queue in {row.queue for row in page} - whole.keys())
            gone = [row.task_id for row in page if not whole[row.queue]]
            if not self._runtime.broker.ready or not self._may_go_on():
                return False
            republish = partial(publishing.republish, kind=kind, task_ids=gone, seen_at=seen_at)
            self._connections.transact("check-now", republish, single=True)
        return True

    def missing(self, rows: Sequence[Any]) -> list[str] | None:
        """Return the task ids of silent rows whose messages are to be published; postpone the check of the others.

        None if the broker does not answer: then nothing could be published either.
        """
        waiting = set(self._waiting([row for row in rows if not row.is_over]))
        if not self._runtime.broker.ready:
            return None
        if waiting:
            self._connections.transact("pass-over", partial(publishing.postpone, task_ids=waiting), single=True)
        return [row.task_id for row in rows if row.task_id not in waiting]

    def _waiting(self, rows: Sequence[Any]) -> Iterator[str]:
        if self._connections.is_broker:
            yield from references.waiting(self._connections, [row.task_id for row in rows])
            return
        for queue, among in groupby(sorted(rows, key=attrgetter("queue")), key=attrgetter("queue")):
            if self._count(queue):
                yield from self._queues[queue].waiting(list(among))

    def _is_whole(self, queue: str) -> bool:
        """Tell whether a queue was not emptied. A tenth may be missing: workers may be fetching just now."""
        ready = self._ready(queue)
        limit = 1 + (ready or 0) * 10 // 9
        return ready is not None and publishing.in_queue(self._connections, queue, limit=limit) < limit

    def _count(self, queue: str) -> bool:
        """Count a queue, once in a turn; False if the broker does not tell."""
        if queue not in self._counted:
            ready = self._ready(queue)
            if ready is None:
                return False
            silent = publishing.overdue(self._connections, queue, limit=min(ready, MANY) + MANY)
            self._queues.setdefault(queue, Queue()).count(silent, ready)
            self._counted.add(queue)
        return True

    def _ready(self, queue: str) -> int | None:
        ready = self._runtime.broker.ready_messages(queue)
        return 0 if ready == GONE else ready


class Queue:
    """Which silent messages of one queue are published again, and how many copies it may get just now."""

    def __init__(self) -> None:
        self._copies = COPIES
        self._copies_at = time.monotonic()

    def count(self, silent: Any, ready: int) -> None:
        """Note how many messages are silent, and how many wait in the broker."""
        self._missing = silent.messages - ready
        self._overtaken: datetime = silent.overtaken
        if time.monotonic() - self._copies_at > COPIES_S:
            self._copies, self._copies_at = COPIES, time.monotonic()

    def waiting(self, rows: Sequence[Any]) -> Iterator[str]:
        """Yield the task ids of silent rows that get no copy.

        The suspected ones get a copy first, and then the oldest: a queue is served in order, so they are the likeliest
        to be missing.
        """
        for row in sorted(rows, key=lambda row: (row.suspected_at is None, row.published_at)):
            if self._missing > 0:
                self._missing -= 1
            elif row.published_at < self._overtaken and self._copies > 0:
                self._copies -= 1
            else:
                yield row.task_id
