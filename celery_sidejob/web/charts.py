"""Runs and failures of the last hour, day and month as columns, from which a template draws SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

DAYS = 30
WIDTH, HEIGHT = 480.0, 110.0
LEAST = 2.0
"""The least height of what is not nothing."""


@dataclass(frozen=True, slots=True)
class Column:
    """The runs of a time; the failures are the lower part of the column."""

    began_at: datetime
    runs: int
    failures: int
    x: float
    width: float
    height: float
    failed_height: float


@dataclass(frozen=True, slots=True)
class Chart:
    """The columns of all times, the oldest first."""

    span: str
    """The time of all columns, and of each."""
    each: str
    columns: Sequence[Column]
    most: int
    """The runs of the highest column."""
    runs: int
    failures: int


def hour_chart(samples: Iterable[tuple[datetime, int, int]], now: datetime | None = None) -> Chart:
    """Return the chart of the last hour, by minutes, of (time, runs, failures) since the time before."""
    return _of_samples("hour", "minute", samples, timedelta(minutes=1), 60, now)


def day_chart(samples: Iterable[tuple[datetime, int, int]], now: datetime | None = None) -> Chart:
    """Return the chart of the last day, by half hours."""
    return _of_samples("day", "half hour", samples, timedelta(minutes=30), 48, now)


def month_chart(days: Mapping[date, tuple[int, int]], today: date | None = None) -> Chart:
    """Return the chart of the last 30 days, in UTC, of {day: (runs, failures)}."""
    today = today or datetime.now(UTC).date()
    shown = [today - timedelta(days=age) for age in reversed(range(DAYS))]
    begins = [datetime(day.year, day.month, day.day, tzinfo=UTC) for day in shown]
    return _chart(f"{DAYS} days", "day", begins, [days.get(day, (0, 0)) for day in shown])


def _of_samples(
    span: str,
    each: str,
    samples: Iterable[tuple[datetime, int, int]],
    step: timedelta,
    number: int,
    now: datetime | None,
) -> Chart:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    last = epoch + ((now or datetime.now(UTC)) - epoch) // step * step
    begins = [last - age * step for age in reversed(range(number))]
    counted = [(0, 0)] * number
    for at, runs, failures in samples:
        place = (at - begins[0]) // step
        if 0 <= place < number:
            counted[place] = counted[place][0] + runs, counted[place][1] + failures
    return _chart(span, each, begins, counted)


def _chart(span: str, each: str, begins: Sequence[datetime], counted: Sequence[tuple[int, int]]) -> Chart:
    most = max(runs for runs, _ in counted)
    step = WIDTH / len(counted)
    columns = [
        Column(
            began_at,
            runs,
            failures,
            round(place * step, 2),
            round(step * 0.82, 2),
            _height(runs, most),
            _height(min(failures, runs), most),
        )
        for place, (began_at, (runs, failures)) in enumerate(zip(begins, counted, strict=True))
    ]
    return Chart(span, each, columns, most, sum(runs for runs, _ in counted), sum(failed for _, failed in counted))


def _height(count: int, most: int) -> float:
    return round(max(count / most * HEIGHT, LEAST), 2) if count else 0.0
