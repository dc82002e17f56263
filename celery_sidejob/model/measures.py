"""What a process has counted and timed, until it is stored."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from . import events, native

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The upper bounds of a duration's buckets, in seconds; what takes longer is in one more, without a bound."""

BUCKET, SUM = "bucket", "sum"

LABELS = {"after": "status"}
"""The label of a total, where it is called otherwise than the field of the event."""

Key = tuple[str, str]
"""(name, label)"""


class Measures:
    """Counts and durations of one process that are not stored yet; safe from any thread.

    Nothing is kept before `begin`: only a worker's processes have somebody who stores what they count. If a process
    is killed, what it had not stored is missing from the totals.
    """

    def __init__(self) -> None:
        self._begun = False
        self._start_anew()

    def begin(self) -> None:
        """Count from now on."""
        self._begun = True

    def end(self) -> None:
        """Count nothing more."""
        self._begun = False

    def count(self, name: str, label: str = "", amount: int = 1) -> None:
        """Count something that happened."""
        if self._begun and amount:
            self._add({(name, label): float(amount)})

    def time(self, operation: str, seconds: float) -> None:
        """Note how long an operation took."""
        if self._begun:
            place = bisect_left(BOUNDS_S, seconds)
            self._add({(f"{operation}_{BUCKET}", str(place)): 1.0, (f"{operation}_{SUM}", ""): seconds})

    def take(self) -> dict[Key, float]:
        """Return what was counted since this was last called, and forget it."""
        self._mind_fork()
        with self._lock:
            taken = dict(self._values)
            self._values.clear()
            self._taken_at = time.monotonic()
        return taken

    def give_back(self, values: Mapping[Key, float]) -> None:
        """Take back what could not be stored: it is tried again with what comes."""
        self._add(values)

    @property
    def begun(self) -> bool:
        """Whether anything is counted."""
        return self._begun

    @property
    def age_s(self) -> float:
        """How long ago something was taken."""
        return time.monotonic() - self._taken_at

    @property
    def quiet_s(self) -> float:
        """How long nothing has been counted."""
        return time.monotonic() - self._added_at

    def _add(self, values: Mapping[Key, float]) -> None:
        self._mind_fork()
        with self._lock:
            for key, amount in values.items():
                self._values[key] = self._values.get(key, 0.0) + amount
            self._added_at = time.monotonic()

    def _mind_fork(self) -> None:
        if self._pid != os.getpid():  # what the parent has counted is stored by the parent
            self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = native.lock()
        self._values: dict[Key, float] = {}
        self._taken_at = self._added_at = time.monotonic()


COUNTED = {event.total: event.meaning for event in events.COUNTED if event.counted_by is None and event.total}
"""The totals of events, and what each means. The sweeper's duties declare their own totals."""

COUNTED_BY = {
    event.total: (LABELS.get(event.counted_by, event.counted_by), event.meaning)
    for event in events.COUNTED
    if event.counted_by is not None and event.total
}
"""The totals of events that are counted by a label: the label's name, and what the total means."""

TIMED = {
    "claim": "a run's claim",
    "checkpoint": "a commit in the middle of a run",
    "end": "a run's last commit",
}
"""The transactions of runs that are timed, and what each is."""


def counts(totals: Mapping[Key, float], counted: Iterable[str]) -> dict[str, Any]:
    """Return the totals of what is `counted`, {name: number}, and of what is by a label, {name: {label: number}}."""
    by_label = {
        name: {label: int(value) for (found, label), value in sorted(totals.items()) if found == name}
        for name in COUNTED_BY
    }
    return {**{name: int(totals.get((name, ""), 0)) for name in counted}, **by_label}


def durations(totals: Mapping[Key, float]) -> dict[str, dict[str, Any]]:
    """Return how long each timed transaction took: how many, seconds in sum, quantiles, and cumulated buckets.

    A quantile is interpolated within its bucket, None if there is none, and at most the last bound.
    """
    found = {}
    for operation in TIMED:
        inside = [int(totals.get((f"{operation}_{BUCKET}", str(place)), 0)) for place in range(len(BOUNDS_S) + 1)]
        cumulated = list(accumulate(inside))
        found[operation] = {
            "count": cumulated[-1],
            "sum_s": totals.get((f"{operation}_{SUM}", ""), 0.0),
            "p50_s": _quantile(0.50, cumulated),
            "p99_s": _quantile(0.99, cumulated),
            "buckets": [*zip(BOUNDS_S, cumulated, strict=False)],
        }
    return found


def _quantile(share: float, cumulated: Sequence[int]) -> float | None:
    wanted = share * cumulated[-1]
    if not wanted:
        return None
    place = next(place for place, count in enumerate(cumulated) if count >= wanted)
    if place == len(BOUNDS_S):
        return BOUNDS_S[-1]
    lower, below = (BOUNDS_S[place - 1], cumulated[place - 1]) if place else (0.0, 0)
    return lower + (BOUNDS_S[place] - lower) * (wanted - below) / (cumulated[place] - below)
