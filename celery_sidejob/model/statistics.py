"""How long the runs of a task in a queue waited, and how long they ran; and what a process counts until it is stored.

A duration is a whole number of microseconds. For each bucket of a histogram the number of durations, their sum and the
sum of their squares are kept. Such numbers are added up exactly, in any order, whichever processes and days they come
from.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from . import events, native
from .checks import shown
from .errors import InvalidValueError
from .events import Measure, TaskFinished

BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0,
    604800.0, math.inf,
)  # fmt: skip
"""The upper bounds of the buckets, in seconds: from five milliseconds to a week, and one bucket for all above."""


def day_of(given: Any) -> date | None:
    """Return the day of a date, of a text such as 2026-11-26, or of the words today and yesterday (in UTC)."""
    if isinstance(given, datetime) or not isinstance(given, date | str | None):
        raise _no_day(given)
    if not isinstance(given, str):
        return given
    today = datetime.now(UTC).date()
    if given in ("today", "yesterday"):
        return today if given == "today" else date.fromordinal(today.toordinal() - 1)
    try:
        return date.fromisoformat(given)
    except ValueError:
        raise _no_day(given) from None


def _no_day(given: Any) -> InvalidValueError:
    return InvalidValueError(
        "day= of statistics() is a date, a text such as '2026-11-26', 'today', 'yesterday', or None for all days, "
        f"not {shown(given)}."
    )


class Tally(NamedTuple):
    """The key under which runs are counted together."""

    queue: str
    task: str
    measure: Measure
    bucket: int
    """The index of its bucket in `BOUNDS_S`; 0 for a measure without durations."""
    step: str = ""
    """The name of a step whose executions are counted; empty for runs."""


class Amount(NamedTuple):
    """The number of runs, and the sum and the sum of squares of their durations, in microseconds."""

    number: int = 0
    total_us: int = 0
    squares_us: int = 0

    def plus(self, other: Amount) -> Amount:
        """Return the sum of both."""
        return Amount(self.number + other.number, self.total_us + other.total_us, self.squares_us + other.squares_us)


def tally_of(queue: str, task: str, measure: Measure, seconds: float | None, step: str = "") -> tuple[Tally, Amount]:
    """Return the tally of one run or step, and the amount to add; `seconds` is None for a measure without durations."""
    if seconds is None:
        return Tally(queue, task, measure, 0, step), Amount(1)
    microseconds = max(0, round(seconds * 1e6))
    return (
        Tally(queue, task, measure, bisect_left(BOUNDS_S, microseconds / 1e6), step),
        Amount(1, microseconds, microseconds * microseconds),
    )


@dataclass(frozen=True, slots=True)
class Durations:
    """Many durations."""

    count: int
    sum_s: float
    mean: float
    """In seconds; 0 without any duration."""
    std: float
    """Their standard deviation in seconds, as of a sample; 0 for less than two durations."""
    histogram: tuple[tuple[float, int], ...]
    """For each bucket its upper bound in seconds, and the number of durations in it: above the previous bound, and not
    above its own. The last bound is infinite."""

    def as_document(self) -> dict[str, Any]:
        """Return the same as JSON values; the bound of the last bucket is None."""
        bounds = [(None if math.isinf(bound) else bound, count) for bound, count in self.histogram]
        return {**asdict(self), "histogram": bounds}


@dataclass(frozen=True, slots=True)
class Statistics:
    """How long the runs of a task in a queue waited and ran; None for the queue or the task means all of them.

    With a step it tells the same of the executions of that step, which have no waits and no losses.
    """

    queue: str | None
    task: str | None
    day: date | None
    """The day, in UTC; None for all days that are kept."""
    waits: Durations
    """From the moment a run was due to its beginning."""
    runs: Durations
    """From the beginning of a run to its end, however it ended. Runs that were lost are not among them."""
    failures: int
    """Runs after which their job or task failed, because it was not tried again."""
    retries: int
    """Runs that are tried again."""
    losses: int
    """Runs that were lost with their worker, or because it could not reach the store."""
    failed_now: int = 0
    """The present entries of the dead set, whatever the day; the newest 10,000 are counted. 0 for a step."""
    step: str | None = None
    """The name of the step whose executions are counted; None for runs."""

    def as_document(self) -> dict[str, Any]:
        """Return the same as JSON values; the bound of the last bucket is None."""
        return {
            **asdict(self),
            "day": None if self.day is None else self.day.isoformat(),
            "waits": self.waits.as_document(),
            "runs": self.runs.as_document(),
        }


def statistics_of(
    amounts: Iterable[tuple[Tally, Amount]],
    *,
    queue: str | None,
    task: str | None,
    day: date | None = None,
    failed_now: int = 0,
    step: str | None = None,
) -> Statistics:
    """Return the sum of tallies, of any queues and tasks, as statistics."""
    found: dict[Measure, dict[int, Amount]] = {measure: {} for measure in Measure}
    for tally, amount in amounts:
        buckets = found[tally.measure]
        buckets[tally.bucket] = buckets.get(tally.bucket, Amount()).plus(amount)
    numbers = {measure: sum(amount.number for amount in buckets.values()) for measure, buckets in found.items()}
    return Statistics(
        queue,
        task,
        day,
        waits=durations_of(found[Measure.WAIT]),
        runs=durations_of(found[Measure.RUN]),
        failures=numbers[Measure.FAILURE],
        retries=numbers[Measure.RETRY],
        losses=numbers[Measure.LOSS],
        failed_now=failed_now,
        step=step,
    )


def durations_of(amounts: Mapping[int, Amount]) -> Durations:
    """Return the durations of a tally's buckets, {bucket: amount}."""
    number, total, squares = map(sum, zip(Amount(), *amounts.values(), strict=True))
    histogram = tuple((bound, amounts.get(bucket, Amount()).number) for bucket, bound in enumerate(BOUNDS_S))
    if not number:
        return Durations(0, 0.0, 0.0, 0.0, histogram)
    variance = 0.0
    if number > 1:  # of whole numbers the difference is exact
        variance = (number * squares - total * total) / (number * (number - 1))
    return Durations(number, total / 1e6, total / number / 1e6, math.sqrt(variance) / 1e6, histogram)


# -- what a process has counted ----------------------------------------------------------------------------------------


TIMED_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The upper bounds of a duration's buckets, in seconds; longer durations go into one more bucket, without a bound."""

LONGEST_NAMES = 600
"""The most characters of the names of a queue, a task and a step together: at four bytes each they fit into a row of an
index."""

BUCKET, SUM = "bucket", "sum"

LABELS = {"after": "status"}
"""The label of a total, if its name differs from the event's field."""

Total = tuple[str, str]
"""The key of a total: (name, label)."""

NOTHING: Mapping[Tally, Amount] = MappingProxyType({})


class Taken(NamedTuple):
    """The counts since the last call of `take`."""

    totals: dict[Total, float]
    tallies: dict[Tally, Amount]
    """Tallies of runs and steps, keyed by queue and task."""
    finished: Sequence[TaskFinished]
    """The durable tasks that have ended, the oldest first."""

    def __bool__(self) -> bool:
        """Tell whether anything was counted."""
        return any(self[:])


class Measures:
    """Counts and durations of one process that are not stored yet; safe from any thread.

    Nothing is counted before `begin`: only a worker's processes store their counts. If a process is killed, its
    unstored counts are missing from the totals.
    """

    def __init__(self, *, task_history: int = 0) -> None:
        self.begun = False
        """Whether counting has begun."""
        self.task_history = task_history
        """How many ended durable tasks are kept, here and in the store."""
        self._start_anew()

    def begin(self) -> None:
        """Count from now on."""
        self.begun = True

    def end(self) -> None:
        """Stop counting."""
        self.begun = False

    def count(self, name: str, label: str = "", amount: int = 1) -> None:
        """Add `amount` to a count."""
        if self.begun and amount:
            self._add({(name, label): float(amount)})

    def time(self, operation: str, seconds: float) -> None:
        """Add the duration of an operation."""
        if self.begun:
            place = bisect_left(TIMED_BOUNDS_S, seconds)
            self._add({(f"{operation}_{BUCKET}", str(place)): 1.0, (f"{operation}_{SUM}", ""): seconds})

    def tally(self, queue: str, task: str, measure: Measure, seconds: float | None = None, step: str = "") -> None:
        """Add the wait or the duration of a run or step, or count that it failed, is tried again or was lost.

        Names that are too long are ignored: they would keep all counts of this process from being stored.
        """
        if self.begun and len(queue) + len(task) + len(step) <= LONGEST_NAMES:
            tally, amount = tally_of(queue, task, measure, seconds, step)
            self._add({}, {tally: amount})

    def finish(self, ended: TaskFinished) -> None:
        """Note a durable task that has ended; beyond `task_history` the oldest is forgotten."""
        if self.begun and len(ended.queue) + len(ended.task) <= LONGEST_NAMES:
            self._add({}, finished=[ended])

    def take(self) -> Taken:
        """Return the counts since the last call, and forget them."""
        self._reset_after_fork()
        with self._lock:
            taken = Taken(dict(self._values), dict(self._tallies), list(self._finished))
            self._values.clear()
            self._tallies.clear()
            self._finished.clear()
            self._taken_at = time.monotonic()
        return taken

    def give_back(self, taken: Taken) -> None:
        """Take back counts that could not be stored: they are stored with the next counts."""
        self._add(*taken)

    @property
    def age_s(self) -> float:
        """Seconds since counts were last taken."""
        return time.monotonic() - self._taken_at

    @property
    def quiet_s(self) -> float:
        """Seconds since something was last counted."""
        return time.monotonic() - self._added_at

    def _add(
        self,
        values: Mapping[Total, float],
        tallies: Mapping[Tally, Amount] = NOTHING,
        finished: Sequence[TaskFinished] = (),
    ) -> None:
        self._reset_after_fork()
        with self._lock:
            for key, amount in values.items():
                self._values[key] = self._values.get(key, 0.0) + amount
            for tally, further in tallies.items():
                self._tallies[tally] = self._tallies[tally].plus(further) if tally in self._tallies else further
            self._finished.extend(finished)
            self._added_at = time.monotonic()

    def _reset_after_fork(self) -> None:
        if self._pid != os.getpid():  # the parent stores the parent's counts
            self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = native.lock()
        self._values: dict[Total, float] = {}
        self._tallies: dict[Tally, Amount] = {}
        self._finished: deque[TaskFinished] = deque(maxlen=self.task_history)
        self._taken_at = self._added_at = time.monotonic()


COUNTED = {event.total: event.meaning for event in events.COUNTED if event.counted_by is None and event.total}
"""The totals of events, and the meaning of each. The sweeper's duties declare their own totals."""

COUNTED_BY = {
    event.total: (LABELS.get(event.counted_by, event.counted_by), event.meaning)
    for event in events.COUNTED
    if event.counted_by is not None and event.total
}
"""The totals of events counted by a label: the label's name, and the total's meaning."""

TIMED = {
    "claim": "a run's claim by its process",
    "claim-page": "a worker's claims of many runs, and their ends",
    "checkpoint": "a commit in the middle of a run",
    "end": "a run's last commit",
}
"""The timed transactions of runs, and the meaning of each."""


def counts(totals: Mapping[Total, float], counted: Iterable[str]) -> dict[str, Any]:
    """Return the totals of `counted`, {name: number}; a total with labels is {name: {label: number}}."""
    by_label = {
        name: {label: int(value) for (found, label), value in sorted(totals.items()) if found == name}
        for name in COUNTED_BY
    }
    return {**{name: int(totals.get((name, ""), 0)) for name in counted}, **by_label}


def durations(totals: Mapping[Total, float]) -> dict[str, dict[str, Any]]:
    """Return the durations of each timed transaction: their number, sum in seconds, quantiles and cumulative buckets.

    A quantile is interpolated within its bucket; None without data, and at most the last bound.
    """
    found = {}
    for operation in TIMED:
        inside = [int(totals.get((f"{operation}_{BUCKET}", str(place)), 0)) for place in range(len(TIMED_BOUNDS_S) + 1)]
        cumulated = list(accumulate(inside))
        found[operation] = {
            "count": cumulated[-1],
            "sum_s": totals.get((f"{operation}_{SUM}", ""), 0.0),
            "p50_s": _quantile(0.50, cumulated),
            "p99_s": _quantile(0.99, cumulated),
            "buckets": [*zip(TIMED_BOUNDS_S, cumulated, strict=False)],
        }
    return found


def _quantile(share: float, cumulated: Sequence[int]) -> float | None:
    wanted = share * cumulated[-1]
    if not wanted:
        return None
    place = next(place for place, count in enumerate(cumulated) if count >= wanted)
    if place == len(TIMED_BOUNDS_S):
        return TIMED_BOUNDS_S[-1]
    lower, below = (TIMED_BOUNDS_S[place - 1], cumulated[place - 1]) if place else (0.0, 0)
    return lower + (TIMED_BOUNDS_S[place] - lower) * (wanted - below) / (cumulated[place] - below)
