"""Messages whose workers died with them: delivered alone, and given up after too many deaths.

While a message is in quarantine its channel fetches nothing. So the next death is charged to that message only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Any, NamedTuple

from ..begun import is_counted_by_a_row
from .dead import headers_of
from .qos import QoS


class Sorted(NamedTuple):
    """Fetched messages, by what is to be done with them."""

    doomed: Sequence[Any]
    """Those that came back as often as they may."""
    delivered: Sequence[Any]
    released: Sequence[Any]
    """Those that would be charged with the death of another."""


class Quarantine:
    """The quarantine of one channel: at most one message is in it, for a time."""

    def __init__(self, *, limit: float, silence_s: float) -> None:
        """`limit` is how often a message may come back; after `silence_s` a consumer counts as dead."""
        self._limit = limit
        self._silence_s = silence_s
        self._alone: tuple[int, float] | None = None

    @property
    def until(self) -> float | None:
        """When the quarantine ends, if the message does not end before; None without one."""
        return None if self._alone is None else self._alone[1]

    def sort(self, found: Sequence[Any]) -> Sorted:
        """Decide what is done with fetched messages; one whose worker died with it begins a quarantine.

        The row that a reference leads to has a limit of its own.
        """
        doomed = [row for row in found if times_back(row) >= self._limit]
        left = [row for row in found if times_back(row) < self._limit]
        first = next((place for place, row in enumerate(left) if row.deaths and row.task_id is None), None)
        if first is None:
            return Sorted(doomed, left, ())
        if first == 0:
            is_grave = 2 * times_back(left[0]) >= self._limit
            self._alone = left[0].id, inf if is_grave else monotonic() + self._silence_s
        delivered = max(1, first)
        return Sorted(doomed, left[:delivered], left[delivered:])

    def is_on(self, qos: QoS) -> bool:
        """Tell whether a message is in quarantine, so that nothing may be fetched now."""
        if self._alone is None:
            return False
        tag, until = self._alone
        if qos.holds(tag) and monotonic() < until:
            return True
        self._alone = None
        return False


def times_back(row: Any) -> int:
    """Return how often a message came back as the delivery limit counts: where a row counts, by deaths alone."""
    if not row.returns or row.task_id is not None:
        return 0
    return int(row.deaths if is_counted_by_a_row(headers_of(row.headers)) else row.returns)
