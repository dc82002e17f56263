"""The places of what templates draw as SVG: runs and steps as bars on a line of time, and charts as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from ..jobs.steps import Step
from ..model.printable import lasting

WIDTH = 1000.0
"""The width of a drawing, in its own units."""
NARROWEST = 3.0
"""The least width of a bar: shorter times could not be seen."""
TICKS = 4


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted: a run, or a step."""

    label: str
    began_at: datetime
    ended_at: datetime
    how: str
    """How it ended, or that it goes on: a class of the bar."""
    told: str
    """What is said of it on hover."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A span at its place."""

    span: Span
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Drawing:
    """Bars over a line of time."""

    bars: Sequence[Bar]
    ticks: Sequence[tuple[float, str]]
    """(place, time since the beginning)."""
    lasted_s: float


def runs_of(history: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return the runs of a job's history, the oldest first; a run in progress lasts until now."""
    spans: dict[int, Span] = {}
    for entry in history:
        run_no, at = entry["run_no"], entry["at"]
        if run_no is None or at is None:
            continue
        if entry["what"] == "claimed":
            spans[run_no] = _run(run_no, at, datetime.now(UTC), "running", entry["worker"])
        elif run_no in spans:
            spans[run_no] = _run(run_no, spans[run_no].began_at, at, entry["what"], entry["worker"])
    return list(spans.values())


def steps_of(steps: Sequence[Step]) -> list[Span]:
    """Return the steps of a job, in order."""
    return [_step(step) for step in steps]


def _run(run_no: int, began_at: datetime, ended_at: datetime, how: str, worker: str | None) -> Span:
    took = lasting(max(0.0, (ended_at - began_at).total_seconds()))
    return Span(f"run {run_no}", began_at, ended_at, how, f"Run {run_no}: {how}, {took}, {worker or 'unknown worker'}")


def _step(step: Step) -> Span:
    how = "failed" if step.error is not None else "completed" if step.done else "running"
    if step.done or step.error is not None:
        ended_at = step.began_at + timedelta(seconds=step.took_s)
    else:
        ended_at = max(datetime.now(UTC), step.began_at)
    took = lasting((ended_at - step.began_at).total_seconds())
    goes_on = "" if step.done else ", waits" if step.due_at is not None or step.took_s == 0 else ", goes on"
    return Span(str(step), step.began_at, ended_at, how, f"{step} ({step.kind}): {took}{goes_on}, tries {step.tries}")


def over_time(spans: Sequence[Span]) -> Drawing | None:
    """Return where spans lie on an axis of time; None without any."""
    if not spans:
        return None
    first, last = min(span.began_at for span in spans), max(span.ended_at for span in spans)
    whole_s = max((last - first).total_seconds(), 0.001)
    bars = []
    for span in spans:
        x = (span.began_at - first).total_seconds() / whole_s * WIDTH
        width = max((span.ended_at - span.began_at).total_seconds() / whole_s * WIDTH, NARROWEST)
        bars.append(Bar(span, round(min(x, WIDTH - NARROWEST), 2), round(min(width, WIDTH), 2)))
    ticks = [(WIDTH * n / TICKS, lasting(whole_s * n / TICKS)) for n in range(TICKS + 1)]
    return Drawing(bars, ticks, whole_s)


# -- runs and failures of the last hour, day and month ---------------------------------------------------------------

DAYS = 30
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CHART_WIDTH, CHART_HEIGHT = 480.0, 110.0
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


SPANS = {"hour": ("minute", timedelta(minutes=1), 60), "day": ("half hour", timedelta(minutes=30), 48)}
"""The times of charts of samples: what a column shows, how long that is, and the number of columns."""


def chart_of(span: str, samples: Iterable[tuple[datetime, int, int]], now: datetime | None = None) -> Chart:
    """Return the chart of the last hour, or of the last day, of (time, runs, failures) since the time before."""
    each, step, number = SPANS[span]
    last = EPOCH + ((now or datetime.now(UTC)) - EPOCH) // step * step
    begins = [last - age * step for age in reversed(range(number))]
    counted = [(0, 0)] * number
    for at, runs, failures in samples:
        place = (at - begins[0]) // step
        if 0 <= place < number:
            counted[place] = counted[place][0] + runs, counted[place][1] + failures
    return _chart(span, each, begins, counted)


def month_chart(days: Mapping[date, tuple[int, int]], today: date | None = None) -> Chart:
    """Return the chart of the last 30 days, in UTC, of {day: (runs, failures)}."""
    today = today or datetime.now(UTC).date()
    shown = [today - timedelta(days=age) for age in reversed(range(DAYS))]
    begins = [datetime(day.year, day.month, day.day, tzinfo=UTC) for day in shown]
    return _chart(f"{DAYS} days", "day", begins, [days.get(day, (0, 0)) for day in shown])


def _chart(span: str, each: str, begins: Sequence[datetime], counted: Sequence[tuple[int, int]]) -> Chart:
    most = max(runs for runs, _ in counted)
    step = CHART_WIDTH / len(counted)
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
    return round(max(count / most * CHART_HEIGHT, LEAST), 2) if count else 0.0
