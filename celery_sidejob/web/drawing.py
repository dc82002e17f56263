"""The places of what templates draw as SVG: runs and steps as bars on a line of time, charts as columns, and graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from ..inspection.graphs import Edge, Graph, Node
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
class Drawing:
    """Bars over a line of time."""

    bars: Sequence[tuple[Span, float, float]]
    """(span, place, width)."""
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


def _run(run_no: int, began_at: datetime, ended_at: datetime, how: str, worker: str | None) -> Span:
    took = lasting(max(0.0, (ended_at - began_at).total_seconds()))
    return Span(f"run {run_no}", began_at, ended_at, how, f"Run {run_no}: {how}, {took}, {worker or 'unknown worker'}")


def span_of(step: Step) -> Span:
    """Return a step; one in progress lasts until now."""
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
        bars.append((span, round(min(x, WIDTH - NARROWEST), 2), round(min(width, WIDTH), 2)))
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


# -- graphs ------------------------------------------------------------------------------------------------------------

BOX_WIDTH, BOX_HEIGHT = 186.0, 48.0
"""The size of a node of a graph."""
ACROSS, DOWN = 64.0, 16.0
"""The space between columns, and between the nodes of a column."""
MARGIN = 6.0
VIA = "via "
"""How the key of a place begins through which an arrow goes."""
SWEEPS = 3
"""How often the columns are put in the order of their neighbours, in each direction."""


@dataclass(frozen=True, slots=True)
class Box:
    """A node at its place."""

    node: Node
    x: float
    y: float
    parts: Sequence[tuple[str, float, float]]
    """(status, x, width): the share of each status in a node, as a part of a bar."""
    is_focus: bool


@dataclass(frozen=True, slots=True)
class GraphDrawing:
    """Boxes and arrows."""

    boxes: Sequence[Box]
    arrows: Sequence[tuple[Edge, str]]
    """(edge, path): each edge as a curve."""
    width: float
    height: float


def drawn(graph: Graph) -> GraphDrawing:
    """Return the places of the nodes of a graph: in columns, from left to right."""
    columns = _columns(_without_circles([node.key for node in graph.nodes], graph.edges))
    ways = {(edge.before, edge.after): _way(columns, edge.before, edge.after) for edge in graph.edges}
    rows = _rows(columns, [pair for way in ways.values() for pair in pairwise(way)])
    least = min(row - _height_of(key) / 2 for key, row in rows.items())
    places = {
        key: (MARGIN + number * (BOX_WIDTH + ACROSS), MARGIN + rows[key] - least)
        for number, column in enumerate(columns)
        for key in column
    }
    boxes = [
        Box(node, places[node.key][0], places[node.key][1] - BOX_HEIGHT / 2, _parts(node), node.key == graph.focus)
        for node in graph.nodes
    ]
    arrows = [(edge, _path([places[key] for key in ways[edge.before, edge.after]])) for edge in graph.edges]
    return GraphDrawing(
        boxes,
        arrows,
        len(columns) * (BOX_WIDTH + ACROSS) - ACROSS + 2 * MARGIN,
        max(box.y for box in boxes) + BOX_HEIGHT + MARGIN,
    )


def _without_circles(keys: Sequence[str], edges: Iterable[Edge]) -> dict[str, set[str]]:
    """Return which nodes lead to each node, without edges that close a circle: a parent may wait for its child."""
    pairs = list(dict.fromkeys((edge.before, edge.after) for edge in edges))
    while True:
        before: dict[str, set[str]] = {key: set() for key in keys}
        for first, second in pairs:
            before[second].add(first)
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            circle = {*pairwise(error.args[1])}
            pairs.remove(next(pair for pair in reversed(pairs) if pair in circle))
        else:
            return before


def _columns(before: Mapping[str, set[str]]) -> list[list[str]]:
    """Put each node into the first column behind all nodes that lead to it."""
    column: dict[str, int] = {}
    for key in TopologicalSorter(before).static_order():
        column[key] = 1 + max((column[each] for each in before[key]), default=-1)
    for key in before:  # a node to which none leads stands just before the nodes to which it leads
        after = [column[second] for second, firsts in before.items() if key in firsts]
        if not before[key] and after:
            column[key] = min(after) - 1
    columns: list[list[str]] = [[] for _ in range(1 + max(column.values()))]
    for key in before:
        columns[column[key]].append(key)
    return columns


def _way(columns: Sequence[list[str]], before: str, after: str) -> list[str]:
    """Return the nodes by which an arrow goes; an arrow over several columns gets a free place in each between."""
    first, last = (next(n for n, column in enumerate(columns) if key in column) for key in (before, after))
    between = []
    for number in range(first + 1, last):
        between.append(f"{VIA}{before} {after} {number}")
        columns[number].append(between[-1])
    return [before, *between, after]


def _rows(columns: Sequence[list[str]], pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return how far down the middle of each node is: near its neighbours; puts the columns in that order."""
    neighbours: dict[str, list[str]] = {key: [] for column in columns for key in column}
    for first, second in pairs:
        neighbours[first].append(second)
        neighbours[second].append(first)
    rows = {key: place * (BOX_HEIGHT + DOWN) for column in columns for place, key in enumerate(column)}
    number = {key: n for n, column in enumerate(columns) for key in column}
    for sweep in range(2 * SWEEPS):
        forward = sweep % 2 == 0
        for column in columns if forward else reversed(columns):
            wanted = {}
            for key in column:
                near = [rows[each] for each in neighbours[key] if (number[each] < number[key]) == forward]
                wanted[key] = sum(near) / len(near) if near else rows[key]
            column.sort(key=wanted.__getitem__)
            rows |= _apart([(key, wanted[key]) for key in column])
    return rows


def _apart(wanted: Sequence[tuple[str, float]]) -> Mapping[str, float]:
    """Return places near the wanted ones, in their order, that do not overlap.

    Nodes that would overlap become a block, which stands around the middle of what its nodes want.
    """
    blocks: list[tuple[float, list[str]]] = []
    offset, offsets = 0.0, {}
    for key, row in wanted:
        offset += _height_of(key) / 2
        offsets[key] = offset
        block = (row - offset, [key])
        while blocks and blocks[-1][0] > block[0]:
            start, keys = blocks.pop()
            size = len(keys) + len(block[1])
            block = ((start * len(keys) + block[0] * len(block[1])) / size, keys + block[1])
        blocks.append(block)
        offset += _height_of(key) / 2 + DOWN
    return {key: start + offsets[key] for start, keys in blocks for key in keys}


def _height_of(key: str) -> float:
    return 0.0 if key.startswith(VIA) else BOX_HEIGHT


def _parts(node: Node) -> list[tuple[str, float, float]]:
    whole, done, parts = sum(node.statuses.values()), 0, []
    for status, count in node.statuses.items():
        parts.append((status, round(done / whole * BOX_WIDTH, 2), round(count / whole * BOX_WIDTH, 2)))
        done += count
    return parts


def _path(places: Sequence[tuple[float, float]]) -> str:
    """Return a curve from the right of the first node to the left of the last, straight through the places between."""
    x, y = places[0][0] + BOX_WIDTH, places[0][1]
    path = f"M{x:.1f} {y:.1f}"
    for next_x, next_y in [*places[1:-1], (places[-1][0] - 5, places[-1][1])]:
        bend = max(ACROSS / 2, (next_x - x) / 2)
        path += f"C{x + bend:.1f} {y:.1f} {next_x - bend:.1f} {next_y:.1f} {next_x:.1f} {next_y:.1f}"
        if (next_x, next_y) in places:
            path += f"h{BOX_WIDTH}"
        x, y = next_x + BOX_WIDTH, next_y
    return path
