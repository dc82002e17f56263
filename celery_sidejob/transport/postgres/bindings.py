"""The bindings of exchanges, as this process has read them: an event that nobody listens to costs no statement.

They are read again when a heart of this process hears that bindings have changed. Without a heart that hears they may
be a second old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Any

from ...model import native
from ...store.broker import queues
from .link import Link

OLD_S, HEARD_S = 1.0, 60.0
"""How old the bindings may be by which a transient message is routed; and where changes are heard of."""

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


class Bindings:
    """The bindings that one connection has read."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, Sequence[Any]]] = {}

    def of(self, exchange: str, link: Link, *, may_be_old: bool = False) -> Sequence[Any]:
        """Return the bindings of an exchange: routing_key, queue, transient."""
        read_at, found = self._read.get(exchange, (-inf, ()))
        now = monotonic()
        old_s = HEARD_S if _hearing[link.channel] > 0 else OLD_S
        if may_be_old and now - read_at <= old_s and read_at > _changed_at.get(link.channel, -inf):
            return found
        found = link.run("read", lambda executor: queues.bound_to(executor, exchange))
        self._read[exchange] = now, found  # as of before: a change that is heard while we read may not be in there
        return found
