"""Deliveries of one channel: each fetched row becomes kombu's message, and is handed to the consumer of its queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kombu.log import get_logger

from ..dead_list import headers_in
from ..decoding import NotAMessageError, made
from ..quarantine import Quarantine, is_counted_by_a_row
from . import dead, rows
from .acknowledgements import Acknowledgements, Reference, Removed
from .link import LOST

logger = get_logger(__name__)


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
        self._acknowledgements.release_soon(row.id for row in fetched if not _is_held(row))
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
            self._acknowledgements.drop(row.id)
        elif self.bury(row, error.reason):
            return
        logger.error("Queue %r had %.200r: %s", row.queue, row.task_id or row.body, error.reason)

    def bury(self, row: Any, reason: str) -> bool:
        """Put a message into the dead list; False if this consumer does not hold it."""
        return dead.bury(self._transport.link.run, row.id, holder=self._transport.consumer, reason=reason)

    def _hand_over(self, row: Any, callback: Callable[[Any], Any]) -> None:
        payload = self.payload_of(row)
        if payload is None:
            self._acknowledgements.drop(row.id)
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
