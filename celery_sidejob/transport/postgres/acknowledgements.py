"""The ends of messages, from their report to the statement that carries them out.

Any thread may report one: it is only noted, and the consuming thread is woken. If that is busy, or its loop was left
for a warm stop, the heart's thread carries it out over its own connection.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kombu.transport import virtual

from ...store.broker import messages
from ...store.broker.holds import Holder
from ...store.results import Ended
from .. import tell_refused
from .link import Run

if TYPE_CHECKING:
    from .transport import Transport

T = TypeVar("T")


SOON_S = 0.005
"""How long an acknowledgement waits for a fetch that it can go with."""


class Page(Protocol):
    """Runs that have ended well, whose rows one statement is to remove."""

    runs: Sequence[Ended]
    over: Set[Any] | None
    """The task ids of those whose rows it has removed; set by who has run it."""


class Outbox(Protocol):
    """What a connection asks of the worker whose store its broker is: rows of the outbox, which its references lead to.

    Without one the channels of a connection leave references to others.
    """

    def asks(self) -> Holder:
        """Return in whose name the fetch that follows at once holds rows."""

    @property
    def is_busy(self) -> bool:
        """Whether the worker has fetched enough to go on for a while."""

    def compose(self, row: Any) -> dict[str, Any] | None:
        """Return kombu's message from a fetched row that is a reference, or None if it leads to nothing any more."""

    def unhold(self, rows: Sequence[Any]) -> None:
        """Give back the rows that fetched references lead to: they were held with the fetch, and are not delivered."""

    def with_ends(self, statement: Callable[[Page], T]) -> T:
        """Run a statement that is to remove the rows of runs that are over; again without them if they prevent it."""


class Reference(int):
    """The delivery tag of a reference. The row's own end was committed, so that no acknowledgement comes too late."""


class Removed(Reference):
    """That of a reference which its fetch has removed, as it holds the row: nothing is left to be acknowledged."""


class Nothing:
    """The `Page` of a connection without an outbox."""

    runs: Sequence[Ended] = ()
    over: Set[Any] | None = None


class Ends(deque[int]):
    """Ends of messages that were reported, and not carried out yet; any thread may report more meanwhile."""

    since = 0.0
    """When the first of them was reported."""

    def report(self, delivery_tag: int) -> None:
        """Add the end of a message."""
        if not self:
            self.since = monotonic()
        self.append(delivery_tag)

    def are_late(self, after_s: float = SOON_S) -> bool:
        """Tell whether the first of them has waited for so long."""
        return bool(self) and monotonic() - self.since >= after_s

    @contextmanager
    def carrying_out(self) -> Iterator[list[int]]:
        """Take all of them for the block; if it raises, they are still to be carried out."""
        taken: list[int] = []
        with suppress(IndexError):
            while True:
                taken.append(self.popleft())
        try:
            yield taken
        except BaseException:
            self.extendleft(reversed(taken))
            raise


class Acknowledgements:
    """The messages of one channel that were acknowledged or returned, and are not yet removed or released."""

    def __init__(self, transport: Transport, is_closed: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_closed = is_closed
        self._pid = os.getpid()
        self.done = Ends()
        """Messages whose rows are to be removed: acknowledged ones, and such as deliver nothing."""
        self.back = Ends()
        """Messages that are to be released: given back, or never delivered."""
        self._begun: set[int] = set()
        """Those of `back` that were begun, and sent back by whoever had begun them."""

    # -- reports, by any thread ------------------------------------------------------------------------------------

    def acknowledge(self, delivery_tag: int, verb: str) -> None:
        """Have a message's row removed soon."""
        if self._is_over:
            if not isinstance(delivery_tag, Reference):  # the next delivery of a reference finds nothing
                self.refuse([delivery_tag], verb)
            return
        if not isinstance(delivery_tag, Removed):
            self.done.report(delivery_tag)
            self._transport.end_late_soon()
        self._transport.wake()

    def give_back(self, delivery_tag: int, *, begun: bool) -> None:
        """Have a message released soon; one that was not begun counts as never delivered.

        Who holds the row of a reference that is removed gives the row back, and not this.
        """
        if isinstance(delivery_tag, Removed):
            return
        if begun:
            self._begun.add(delivery_tag)
        if self._is_over:
            self.refuse([delivery_tag], "requeue")
            return
        self.back.report(delivery_tag)
        self._transport.end_late_soon()
        self._transport.wake()

    # -- carrying them out -------------------------------------------------------------------------------------------

    @property
    def next_at(self) -> float:
        """When the removals can wait no longer."""
        return self.done.since + SOON_S if self.done else inf

    def removing(self, statement: Callable[[list[int], Page], T]) -> T:
        """Run a statement that removes acknowledged messages, and rows of the outbox whose runs are over.

        If it raises, they are still to be removed.
        """
        outbox = self._transport.outbox
        with self.done.carrying_out() as done:
            if outbox is None:
                return statement(done, Nothing())
            return outbox.with_ends(lambda page: statement(done, page))

    def remove(self, run: Run) -> None:
        """Remove what was acknowledged, and the rows of runs that have ended."""
        holder = self._transport.consumer

        def removed(done: list[int], page: Page) -> frozenset[int]:
            refused: frozenset[int]
            refused, page.over = run(
                "remove", lambda executor: messages.remove(executor, holder=holder, done=done, over=page.runs)
            )
            return refused

        if self.done:
            self.refuse(self.removing(removed), "ack")

    def release(self, run: Run) -> bool:
        """Release what was given back; False if nothing was."""
        if not self.back:
            return False
        holder = self._transport.consumer
        with self.back.carrying_out() as back:
            if not back:  # another thread has just taken them
                return False
            begun = [one for one in back if one in self._begun]
            refused = run("release", lambda executor: messages.release(executor, holder=holder, ids=back, begun=begun))
        self._begun.difference_update(begun)
        self.refuse(refused, "requeue")
        return True

    def refuse(self, delivery_tags: Iterable[int], verb: str) -> None:
        """Announce ends that came too late."""
        for delivery_tag in delivery_tags:
            tell_refused(verb, str(self._transport.consumer), delivery_tag)

    @property
    def _is_over(self) -> bool:
        """Whether this channel holds nothing any more: it was closed, or is a forked copy."""
        return self._is_closed() or self._pid != os.getpid()


# -- kombu's view of them ----------------------------------------------------------------------------------------------


class QoS(virtual.QoS):
    """kombu's, whose ends of messages any thread may report: they are only noted."""

    def ack(self, delivery_tag: Any) -> None:
        """Adds to kombu's: the row is removed soon."""
        if _is_row(delivery_tag):
            self.channel.acknowledgements.acknowledge(delivery_tag, "ack")
        super().ack(delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Replaces sending the message again: its row becomes free where it is."""
        if not _is_row(delivery_tag):
            pass
        elif requeue:
            self.channel.acknowledgements.give_back(delivery_tag, begun=True)
        else:
            self.channel.acknowledgements.acknowledge(delivery_tag, "reject")
        super().ack(delivery_tag)

    @property
    def unacknowledged_rows(self) -> list[int]:
        """The messages that are neither acknowledged nor given back, but for those that have no row of the broker."""
        return [tag for tag in self._delivered if _is_row(tag) and not isinstance(tag, Removed)]

    def restore_unacked(self) -> None:
        """Replaces giving back one by one: all rows become free in one statement."""
        self.channel.leave()
        self._delivered.clear()
        self._dirty.clear()


def _is_row(delivery_tag: Any) -> bool:
    """Tell whether a message has a row of its own: a broadcast is everybody's, and goes by itself."""
    return isinstance(delivery_tag, int)
