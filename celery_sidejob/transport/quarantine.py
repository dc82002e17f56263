"""A message whose worker died with it, or left, is delivered alone: the next death is charged to that message only."""

from __future__ import annotations

from math import inf
from time import monotonic
from typing import Any


class Quarantine:
    """The quarantine of one channel: while a message is in it, the channel fetches nothing."""

    def __init__(self, *, limit: float, silence_s: float) -> None:
        """`limit`: how often a message may come back. `silence_s`: after so many seconds a consumer counts as dead."""
        self.limit = limit
        self._silence_s = silence_s
        self._alone: tuple[Any, float] | None = None

    @property
    def until(self) -> float | None:
        """When the quarantine ends, if the message does not end before; None without one."""
        return None if self._alone is None else self._alone[1]

    def begin(self, delivery_tag: Any, returns: int) -> None:
        """Fetch nothing beside this message, until a heart has noted which messages have begun.

        From half of the limit on it lasts until the message is done: messages that run long beside it may be just as
        much to blame.
        """
        is_grave = 2 * returns >= self.limit
        self._alone = delivery_tag, inf if is_grave else monotonic() + self._silence_s

    def is_on(self, qos: Any) -> bool:
        """Tell whether a message is in quarantine, so that nothing may be fetched now."""
        if self._alone is None:
            return False
        delivery_tag, until = self._alone
        if holds(qos, delivery_tag) and monotonic() < until:
            return True
        self._alone = None
        return False


def holds(qos: Any, delivery_tag: Any) -> bool:
    """Tell whether a message was delivered, and is neither acknowledged nor given back."""
    return delivery_tag in qos._delivered and delivery_tag not in qos._dirty
