"""How long the runs of a task in a queue waited, and how long they ran.

A duration is a whole number of microseconds. For each bucket of a histogram the number of durations, their sum and the
sum of their squares are kept. Such numbers are added up exactly, in any order, whichever processes and days they come
from.
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


class Measure(StrEnum):
    """What is measured of runs."""

    WAIT = "wait"
    """From the moment a run was due to its beginning."""
    RUN = "run"
    """From its beginning to its end, however it ended; a run that was taken from its worker has none."""
    FAILURE = "failure"
    RETRY = "retry"
    LOSS = "loss"


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
