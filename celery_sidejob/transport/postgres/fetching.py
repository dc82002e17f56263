"""Fetches of one channel, and deliveries of what they took: from where, how many, and when a statement is worth it.

One statement removes what was acknowledged since the last one, and takes the next messages. Each (queue, priority) has
a lower bound, the id behind the last one taken: Postgres then does not step over rows that were removed and not
vacuumed. What lies below it is looked for about once a second: messages that came back, and those of senders that
committed late. In a delivery each fetched row becomes kombu's message, and is handed to the consumer of its queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from kombu.log import get_logger

from ...model.crash_points import reach
from ...store.broker import messages
from ...store.broker.holds import NOBODY
from ...store.broker.messages import HIGHEST_PRIORITY, Watermark
from ..dead_list import headers_in
from ..decoding import NotAMessageError, made
from ..quarantine import Quarantine, is_counted_by_a_row
from . import dead, rows
from .acknowledgements import SOON_S, Acknowledgements, Page, QoS, Reference, Removed
from .link import LOST

logger = get_logger(__name__)

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
            return acknowledgements.done.are_late()
        outbox = self._transport.outbox
        is_busy = outbox is not None and outbox.is_busy
        held = len(qos._delivered) - len(qos._dirty)  # kombu forgets a little later what has ended
        if not is_busy and 2 * room >= min(room + held, AT_MOST):
            return True
        self.next_at = self._fetched_at + (BUSY_S if is_busy and not acknowledgements.done else SOON_S)
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


class Deliveries:
    """Delivers for one channel; `transport` is its connection."""

    def __init__(self, channel: Any, transport: Any, acknowledgements: Acknowledgements) -> None:
        self._channel = channel
        self._transport = transport
        self._acknowledgements = acknowledgements
        self.are_under_way = False
        """Whether messages are handed over just now, which may take long where that runs them (the pool solo)."""

    def deliver(self, found: Sequence[Any]) -> bool:
        """Deliver messages in their order; those that cannot be delivered go back to their places."""
        left = deque(found)
        self.are_under_way = True
        try:
            while left:
                self._transport.check_alive()  # with solo, each message before this one was run here
                row = left[0]
                callback = self._transport._callbacks.get(row.queue)
                if callback is None:  # it was cancelled meanwhile
                    self.return_undelivered([row])
                else:
                    try:
                        self._hand_over(row, callback)
                    except NotAMessageError as error:  # it would end each worker that is given it
                        self.give_up_unreadable(row, error)
                left.popleft()
        finally:
            self.are_under_way = False
            delivered = self._channel.qos._delivered
            self.return_undelivered([row for row in left if row.id not in delivered])
        return bool(found)

    def return_undelivered(self, fetched: Sequence[Any]) -> None:
        """Give back what was fetched and is not delivered."""
        self._acknowledgements.back.extend(row.id for row in fetched if not _is_held(row))
        held = [row for row in fetched if _is_held(row)]
        if held:
            self._transport.outbox.unhold(held)

    def payload_of(self, row: Any) -> dict[str, Any] | None:
        """Return a message as kombu has it; None for a reference that leads nowhere. May raise NotAMessageError."""
        if row.task_id is None:
            return rows.returned(made(partial(rows.payload_of, row, row.id)), row.returns)
        payload: dict[str, Any] | None = self._transport.outbox.compose(row)
        if payload is not None:
            payload["properties"]["delivery_tag"] = Removed(row.id) if _is_held(row) else Reference(row.id)
            rows.returned(payload, row.returns)
        return payload

    def give_up_unreadable(self, row: Any, error: NotAMessageError) -> None:
        """Give up what is no message; of a reference, its row is left to the sweeper."""
        if row.task_id is not None:
            self._acknowledgements.done.append(row.id)
        elif self.bury(row, error.reason):
            return
        logger.error("Queue %r had %.200r: %s", row.queue, row.task_id or row.body, error.reason)

    def bury(self, row: Any, reason: str) -> bool:
        """Put a message into the dead list; False if this consumer does not hold it."""
        return dead.bury(self._transport.link.run, row.id, holder=self._transport.consumer, reason=reason)

    def _hand_over(self, row: Any, callback: Callable[[Any], Any]) -> None:
        payload = self.payload_of(row)
        if payload is None:
            self._acknowledgements.done.append(row.id)
            return
        try:
            callback(payload)
        except (NotAMessageError, *LOST):
            raise
        except Exception:  # it ends this worker, and may end each that is given it: so it counts as come back
            if row.task_id is None:
                self._acknowledgements.give_back(row.id, begun=True)
            else:
                self.return_undelivered([row])
            raise


def _is_held(row: Any) -> bool:
    """Tell whether the fetch of a reference holds its row, and has removed the reference."""
    return getattr(row, "held_at", None) is not None


# -- messages whose workers died with them -----------------------------------------------------------------------------


def sort(found: Sequence[Any], quarantine: Quarantine) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return which fetched messages are doomed, delivered and released; one whose worker died begins a quarantine.

    The doomed came back as often as they may; the released would be charged with the death of another. The row that a
    reference leads to has a limit of its own.
    """
    doomed = [row for row in found if times_back(row) >= quarantine.limit]
    left = [row for row in found if times_back(row) < quarantine.limit]
    first = next((place for place, row in enumerate(left) if row.deaths and row.task_id is None), None)
    if first is None:
        return doomed, left, ()
    if first == 0:
        quarantine.begin(left[0].id, times_back(left[0]))
    delivered = max(1, first)
    return doomed, left[:delivered], left[delivered:]


def times_back(row: Any) -> int:
    """Return how often a message came back as the delivery limit counts: where a row counts, by deaths alone."""
    if not row.returns or row.task_id is not None:
        return 0
    return int(row.deaths if is_counted_by_a_row(headers_in(row.headers)) else row.returns)
