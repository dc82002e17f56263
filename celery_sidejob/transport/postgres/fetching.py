"""Fetches of one channel: from where, how many, and when a statement is worth it.

One statement removes what was acknowledged since the last one, and takes the next messages. Each (queue, priority) has
a lower bound, the id behind the last one taken: Postgres then does not step over rows that were removed and not
vacuumed. What lies below it is looked for about once a second: messages that came back, and those of senders that
committed late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any

from ...model.crash_points import reach
from ...store.broker import messages
from ...store.broker.holds import NOBODY
from ...store.broker.messages import HIGHEST_PRIORITY, Watermark
from .acknowledgements import SOON_S, Acknowledgements, QoS
from .outbox import Page

AT_MOST = 64
"""The most messages that one fetch takes."""
BUSY_S = 0.05
"""How long a fetch waits for more room while enough messages wait in the worker."""
SPARE_S = 0.01
"""How often a worker that prefetches nothing is asked whether it can begin another task."""
WHOLE_S = 1.0
"""How long fetches look only behind the lower bounds."""
WHOLE_SHARE = 20
"""A look from the beginning comes again after this many times as long as it took: it takes a twentieth of the time."""


class Fetching:
    """What one channel knows of its fetches; `transport` is its connection."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.hungry = False
        """Whether there may be messages that this channel has not looked for."""
        self.spare: Callable[[], int] | None = None
        """How many more messages the worker can begin, if it is to be given no others."""
        self.next_at = inf
        """When a fetch that is put off is due."""
        self._lows: dict[tuple[str, int], int] = {}
        self._whole_at = 0.0
        self._fetched_at = 0.0

    def look_at_all(self) -> None:
        """Have the next fetch look from the beginning of each queue."""
        self.hungry = True
        self._whole_at = 0.0

    def room(self, qos: QoS) -> int:
        """Return how many messages the channel may be given."""
        if not qos.can_consume():
            return 0
        free: int | None = qos.can_consume_max_estimate()
        if free is None:
            free = AT_MOST if self._transport.has_loop else 1
        if self.spare is not None:
            free = max(0, min(free, self.spare()))
        return min(free, AT_MOST)

    def is_worth_it(self, room: int, acknowledgements: Acknowledgements, qos: QoS) -> bool:
        """Tell whether it is worth a statement now: half of the room is free, or it is a while since the last one.

        In a drain the acknowledgements of several messages thereby go with one fetch; and no process of a pool
        waits for longer than `SOON_S` because others are busy. While as many messages wait here as run, a fetch waits,
        however much room there is, and may wait longer: what it would take is left to other workers.
        """
        if not self.hungry:
            return acknowledgements.are_removals_late()
        outbox = self._transport.outbox
        is_busy = outbox is not None and outbox.is_busy
        held = len(qos._delivered) - len(qos._dirty)  # kombu forgets a little later what has ended
        if not is_busy and 2 * room >= min(room + held, AT_MOST):
            return True
        self.next_at = self._fetched_at + (BUSY_S if is_busy and not acknowledgements.removals else SOON_S)
        return monotonic() >= self.next_at

    def fetch(self, queues: Sequence[str], room: int, acknowledgements: Acknowledgements) -> Sequence[Any]:
        """Remove what was acknowledged, and return the next messages, which this consumer then holds."""
        self.hungry = False
        found = self._look(queues, lambda watermarks: self._ask(watermarks, room, acknowledgements))
        self._fetched_at = monotonic()
        self.hungry = len(found) >= room
        return found

    def fetch_one(self, queue: str, acknowledgements: Acknowledgements) -> Sequence[Any]:
        """Return the next message of a queue, wherever it is, if there is one."""
        return self._look([queue], lambda watermarks: self._ask(watermarks, 1, acknowledgements), whole=True)

    def take(self, queues: Sequence[str], room: int, *, whole: bool = False) -> Sequence[Any]:
        """Return the next messages, which nobody will acknowledge: their rows are gone."""
        reads, run = self._transport.outbox is not None, self._transport.link.run
        return self._look(
            queues,
            lambda watermarks: run(
                "take", lambda executor: messages.take(executor, watermarks=watermarks, room=room, reads=reads)
            ),
            whole=whole,
        )

    def _look(
        self, queues: Sequence[str], ask: Callable[[Sequence[Watermark]], Sequence[Any]], *, whole: bool = False
    ) -> Sequence[Any]:
        began = monotonic()
        whole = whole or began >= self._whole_at
        found = ask(
            [
                Watermark(queue, priority, 0 if whole else self._lows.get((queue, priority), 0))
                for priority in range(HIGHEST_PRIORITY, -1, -1)
                for queue in queues
            ]
        )
        for row in found:
            self._lows[row.queue, row.priority] = row.id + 1
        if whole:
            now = monotonic()
            self._whole_at = now + max(WHOLE_S, WHOLE_SHARE * (now - began))
        return found

    def _ask(self, watermarks: Sequence[Watermark], room: int, acknowledgements: Acknowledgements) -> Sequence[Any]:
        transport, outbox = self._transport, self._transport.outbox
        transport.start_heart()
        consumer = transport.consumer
        worker = NOBODY if outbox is None else outbox.asks()

        def fetched(done: list[int], page: Page) -> messages.Fetched:
            found: messages.Fetched = transport.link.run(
                "fetch",
                lambda executor: messages.fetch(
                    executor,
                    holder=consumer,
                    done=done,
                    watermarks=watermarks,
                    room=room,
                    reads=outbox is not None,
                    worker=worker,
                    over=page.runs,
                ),
            )
            if any(row.held_at is not None for row in found.rows):
                reach("durable-hold:after-commit")
            page.over = found.over
            return found

        found = acknowledgements.removing(fetched)
        acknowledgements.refuse(found.refused, "ack")
        transport.check_fetched(found)
        return found.rows
