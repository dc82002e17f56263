"""Runs and steps as bars on a line of time: their places, from which a template draws SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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
    began: dict[int, Mapping[str, Any]] = {}
    spans: dict[int, Span] = {}
    for entry in history:
        run_no, at = entry["run_no"], entry["at"]
        if run_no is None or at is None:
            continue
        if entry["what"] == "claimed":
            began[run_no] = entry
            spans[run_no] = _run(run_no, at, datetime.now(UTC), "running", entry["worker"])
        elif run_no in began:
            spans[run_no] = _run(run_no, began[run_no]["at"], at, entry["what"], entry["worker"])
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
