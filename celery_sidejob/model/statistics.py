"""What the runs of a task in a queue have taken: how long each waited, and how long it ran.

A duration is kept as a whole number of microseconds, and of many are kept their number, their sum and the sum of their
squares, for each bucket of a histogram. Such numbers are added up exactly, in any order, whichever processes and days
they come from.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Any, NamedTuple

from .checks import shown
from .errors import InvalidValueError

BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0,
    604800.0, math.inf,
)  # fmt: skip
"""The upper bounds of the buckets, in seconds: from five milliseconds to a week, and one bucket for all above."""


def day_of(given: Any) -> date | None:
    """Return the day that is meant by a date, a text such as 2026-11-26, or the words today and yesterday (in UTC)."""
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


class Measure(StrEnum):
    """What is counted of runs."""

    WAIT = "wait"
    """From the moment at which a run was due to its beginning."""
    RUN = "run"
    """From its beginning to its end, however it ended; a run that was taken from its worker has none."""
    FAILURE = "failure"
    RETRY = "retry"
    LOSS = "loss"


class Tally(NamedTuple):
    """What is counted together."""

    queue: str
    task: str
    measure: Measure
    bucket: int
    """The place of its bucket in `BOUNDS_S`; 0 for what has no duration."""


class Amount(NamedTuple):
    """How often, and the sum and the sum of the squares of the durations, in microseconds."""

    number: int = 0
    total_us: int = 0
    squares_us: int = 0

    def plus(self, other: Amount) -> Amount:
        """Return the sum of both."""
        return Amount(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def tally_of(queue: str, task: str, measure: Measure, seconds: float | None) -> tuple[Tally, Amount]:
    """Return what one more of these adds to which tally; `seconds` is None for what has no duration."""
    if seconds is None:
        return Tally(queue, task, measure, 0), Amount(1)
    microseconds = max(0, round(seconds * 1e6))
    return (
        Tally(queue, task, measure, bisect_left(BOUNDS_S, microseconds / 1e6)),
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
    """Their standard deviation, as that of a sample, in seconds; 0 for less than two durations."""
    histogram: tuple[tuple[float, int], ...]
    """For each bucket its upper bound in seconds, and how many durations are in it: above the bound before it, and not
    above its own. The last bound is infinite."""

    def as_document(self) -> dict[str, Any]:
        """Return the same as JSON values; the bound of the last bucket is None."""
        bounds = [(None if math.isinf(bound) else bound, count) for bound, count in self.histogram]
        return {**asdict(self), "histogram": bounds}


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the runs of a task in a queue have taken; None for the queue or the task means all of them."""

    queue: str | None
    task: str | None
    day: date | None
    """The day, in UTC; None means all days that are kept."""
    waits: Durations
    """From the moment at which a run was due to its beginning."""
    runs: Durations
    """From the beginning of a run to its end, however it ended. Runs that were lost are not among them."""
    failures: int
    """Runs with which their job or task failed: it was not tried again."""
    retries: int
    """Runs that are tried again."""
    losses: int
    """Runs that were lost with their worker, or because it could not reach the store."""
    failed_now: int = 0
    """Entries of the dead set at this moment, whatever the day; up to 10,000, the newest, are counted."""

    def as_document(self) -> dict[str, Any]:
        """Return the same as JSON values; the bound of the last bucket is None."""
        return {
            **asdict(self),
            "day": None if self.day is None else self.day.isoformat(),
            "waits": self.waits.as_document(),
            "runs": self.runs.as_document(),
        }


def statistics_of(
    amounts: Iterable[tuple[Tally, Amount]], *, queue: str | None, task: str | None, day: date | None = None,
    failed_now: int = 0,
) -> Statistics:  # fmt: skip
    """Return the statistics of tallies, of any queues and tasks, added up."""
    found: dict[Measure, dict[int, Amount]] = {measure: {} for measure in Measure}
    for tally, amount in amounts:
        buckets = found[tally.measure]
        buckets[tally.bucket] = buckets.get(tally.bucket, Amount()).plus(amount)
    numbers = {measure: sum(amount.number for amount in buckets.values()) for measure, buckets in found.items()}
    return Statistics(
        queue, task, day,
        waits=durations_of(found[Measure.WAIT]),
        runs=durations_of(found[Measure.RUN]),
        failures=numbers[Measure.FAILURE],
        retries=numbers[Measure.RETRY],
        losses=numbers[Measure.LOSS],
        failed_now=failed_now,
    )  # fmt: skip


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
