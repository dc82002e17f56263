"""A graph from left to right: the places of its nodes in columns, from which a template draws SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from ..inspection.graphs import Edge, Graph, Node

WIDTH, HEIGHT = 186.0, 48.0
"""The size of a node."""
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
class Arrow:
    """An edge, as a curve."""

    edge: Edge
    path: str


@dataclass(frozen=True, slots=True)
class GraphDrawing:
    """Boxes and arrows."""

    boxes: Sequence[Box]
    arrows: Sequence[Arrow]
    width: float
    height: float


def drawn(graph: Graph) -> GraphDrawing:
    """Return the places of the nodes of a graph."""
    keys = [node.key for node in graph.nodes]
    columns = _columns(keys, _without_circles(keys, graph.edges))
    ways = {(edge.before, edge.after): _way(columns, edge.before, edge.after) for edge in graph.edges}
    rows = _rows(columns, [pair for way in ways.values() for pair in pairwise(way)])
    least = min(row - _height(key) / 2 for key, row in rows.items())
    places = {
        key: (MARGIN + number * (WIDTH + ACROSS), MARGIN + rows[key] - least)
        for number, column in enumerate(columns)
        for key in column
    }
    boxes = [
        Box(node, places[node.key][0], places[node.key][1] - HEIGHT / 2, _parts(node), node.key == graph.focus)
        for node in graph.nodes
    ]
    arrows = [Arrow(edge, _path([places[key] for key in ways[edge.before, edge.after]])) for edge in graph.edges]
    return GraphDrawing(
        boxes,
        arrows,
        len(columns) * (WIDTH + ACROSS) - ACROSS + 2 * MARGIN,
        max(box.y for box in boxes) + HEIGHT + MARGIN,
    )


def _without_circles(keys: Iterable[str], edges: Iterable[Edge]) -> list[tuple[str, str]]:
    """Return the edges without those that close a circle: a parent may wait for its child."""
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
            return pairs


def _columns(keys: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Put each node into the first column behind all nodes that lead to it."""
    before: dict[str, set[str]] = {key: set() for key in keys}
    for first, second in pairs:
        before[second].add(first)
    column: dict[str, int] = {}
    for key in TopologicalSorter(before).static_order():
        column[key] = 1 + max((column[each] for each in before[key]), default=-1)
    for key in keys:  # a node to which none leads stands just before the nodes to which it leads
        after = [column[second] for first, second in pairs if first == key]
        if not before[key] and after:
            column[key] = min(after) - 1
    columns: list[list[str]] = [[] for _ in range(1 + max(column.values()))]
    for key in keys:
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
    rows = {key: place * (HEIGHT + DOWN) for column in columns for place, key in enumerate(column)}
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
        offset += _height(key) / 2
        offsets[key] = offset
        block = (row - offset, [key])
        while blocks and blocks[-1][0] > block[0]:
            start, keys = blocks.pop()
            size = len(keys) + len(block[1])
            block = ((start * len(keys) + block[0] * len(block[1])) / size, keys + block[1])
        blocks.append(block)
        offset += _height(key) / 2 + DOWN
    return {key: start + offsets[key] for start, keys in blocks for key in keys}


def _height(key: str) -> float:
    return 0.0 if key.startswith(VIA) else HEIGHT


def _parts(node: Node) -> list[tuple[str, float, float]]:
    whole, done, parts = sum(node.statuses.values()), 0, []
    for status, count in node.statuses.items():
        parts.append((status, round(done / whole * WIDTH, 2), round(count / whole * WIDTH, 2)))
        done += count
    return parts


def _path(places: Sequence[tuple[float, float]]) -> str:
    """Return a curve from the right of the first node to the left of the last, straight through the places between."""
    x, y = places[0][0] + WIDTH, places[0][1]
    path = f"M{x:.1f} {y:.1f}"
    for next_x, next_y in [*places[1:-1], (places[-1][0] - 5, places[-1][1])]:
        bend = max(ACROSS / 2, (next_x - x) / 2)
        path += f"C{x + bend:.1f} {y:.1f} {next_x - bend:.1f} {next_y:.1f} {next_x:.1f} {next_y:.1f}"
        if (next_x, next_y) in places:
            path += f"h{WIDTH}"
        x, y = next_x + WIDTH, next_y
    return path
