"""Queues and bindings: they are rows, and so the same for every process.

A process keeps the bindings that it has read: an event that nobody listens to costs no statement. They are read again
when a heart of this process hears that bindings have changed. Without a heart that hears they may be a second old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from ...model import native
from ...store.broker import dead, messages, queues
from .link import Link, Run

OLD_S, HEARD_S = 1.0, 60.0
"""How old the bindings may be by which a transient message is routed; and where changes are heard of."""
UNUSED_S = 3600.0
"""How long a transient queue without an expiry of its own is kept when nobody uses it."""
USED_SHARE, USED_S = 3, 60.0
"""A queue is noted as used after this share of the time after which it would expire, and at least this often."""


class Topology:
    """Queues and bindings, as one connection declares and reads them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._bindings: dict[str, tuple[float, Sequence[Any]]] = {}
        """The bindings of exchanges that it has read, and when."""
        self._transient: dict[str, bool] = {}
        """The queues that were declared over this connection."""
        self._expires: dict[str, float | None] = {}
        """After how many unused seconds each of them goes."""
        self._used_at: dict[str, float] = {}

    def declare(self, queue: str, *, transient: bool, expires_ms: int | None) -> None:
        """Declare a queue; one that expires is removed after so long without use."""
        unused_s = expires_ms / 1000 if expires_ms is not None else UNUSED_S if transient else None
        # A message that is routed by a binding that a crash has undone would reach nobody.
        self._link.run(
            "declare",
            lambda executor: queues.declare(executor, queue, transient=transient, unused_s=unused_s),
            lastingly=True,
        )
        self._expires[queue] = unused_s
        self._transient[queue] = transient

    def is_declared(self, queue: str) -> bool:
        """Tell whether a queue is there."""
        return self._link.run("read", lambda executor: queues.is_declared(executor, queue))

    def is_transient(self, queue: str) -> bool:
        """Tell whether a queue of this connection need not survive its consumer."""
        return self._transient.get(queue, False)

    def delete(self, queue: str) -> None:
        """Remove a queue and its bindings; its messages stay."""
        self._link.run("delete", lambda executor: queues.delete(executor, queue))
        self._expires.pop(queue, None)

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Have a queue get the messages that an exchange has for a routing key."""
        self._link.run("bind", lambda executor: queues.bind(executor, exchange, queue, routing_key), lastingly=True)

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Remove a binding."""
        self._link.run("unbind", lambda executor: queues.unbind(executor, exchange, queue, routing_key))

    def bound_to(self, exchange: str, *, may_be_old: bool = False) -> Sequence[Any]:
        """Return the bindings of an exchange: routing_key, queue, transient."""
        read_at, found = self._bindings.get(exchange, (-inf, ()))
        now, rings = monotonic(), self._link.channel
        old_s = HEARD_S if _hearing[rings] > 0 else OLD_S
        if may_be_old and now - read_at <= old_s and read_at > _changed_at.get(rings, -inf):
            return found
        found = self._link.run("read", lambda executor: queues.bound_to(executor, exchange))
        self._bindings[exchange] = now, found  # as of before: it may lack a change that is heard while we read
        return found

    def expiring(self, names: Iterable[str]) -> Iterator[str]:
        """Yield those of these queues that would expire, and whose use was not noted lately; they count as noted."""
        now = monotonic()
        for name in names:
            unused_s = self._expires.get(name)
            if unused_s is not None and now - self._used_at.get(name, -inf) >= min(unused_s / USED_SHARE, USED_S):
                self._used_at[name] = now
                yield name


def remove_expired(run: Run) -> None:
    """Delete queues that nobody has used for so long, with what waits in them, and old broadcasts.

    Any number of processes may do so at once. If we die in between, a queue that has expired is emptied by the next.
    """
    for name in run("read", queues.expired):
        run("purge", partial(messages.purge_later, queue=name))
        while run("purge", partial(messages.purge_page, queue=name)):
            pass
        run("expire", partial(queues.expire, name=name))
    run("forget", queues.forget_broadcasts)


# -- when bindings have changed, as this process has heard -----------------------------------------------------------

_lock = native.lock()
_changed_at: dict[str, float] = {}
_hearing: Counter[str] = Counter()
"""How many hearts of this process hear of changes, by the channel of their rings."""


def hear(channel: str) -> None:
    """Note that a heart hears of changes from now on."""
    with _lock:
        _hearing[channel] += 1
    note_change(channel)  # or one that it had not heard yet would be missed


def hear_no_more(channel: str) -> None:
    """Note that a heart has ended, or hears no more."""
    with _lock:
        _hearing[channel] -= 1


def note_change(channel: str) -> None:
    """Have all bindings read again that were read before now; `channel` is that of their schema's rings."""
    _changed_at[channel] = monotonic()


# -- for the people who run a broker -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overview:
    """How many consumers, queues and messages a broker has."""

    consumers: int
    """Consumers, with those that are dead and not found out yet."""
    queues: Sequence[Any]
    """The lasting queues: name, ready, held, later."""
    dead: int
    """Messages in the dead list."""

    @property
    def held(self) -> int:
        """Messages that consumers hold."""
        return sum(queue.held for queue in self.queues)


def overview_of(link: Link) -> Overview:
    """Read the state from a broker."""
    return Overview(
        link.run("read", queues.count_consumers), link.run("read", queues.counts), link.run("read", dead.count)
    )
