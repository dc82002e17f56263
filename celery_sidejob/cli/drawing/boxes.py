"""Few jobs: labelled boxes from left to right, arranged by igraph (Reingold-Tilford)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...model.errors import SideJobError
from .node import Node, text_width
from .picture import PAPER, RECOVERED, Picture

BOX_FONT, BOX_HEIGHT, ROW, COLUMN_GAP = 13.0, 24.0, 34.0, 56.0


class DrawingLibraryMissingError(SideJobError, ImportError):
    """Drawing was asked for without igraph: ``pip install "celery-sidejob[graph]"``."""


def draw_boxes(picture: Picture, nodes: Sequence[Node]) -> None:
    """Draw a box for each job, and a line from it to each of its children.

    Each level is a column as wide as its longest label.
    """
    widths: Counter[int] = Counter()
    for node in nodes:
        widths[node.level] = max(widths[node.level], math.ceil(_width(node)))
    lefts = [0.0]
    for level in range(max(widths)):
        lefts.append(lefts[-1] + widths[level] + COLUMN_GAP)
    places = {node: (lefts[node.level], BOX_HEIGHT / 2 + row * ROW) for node, row in _arranged(nodes).items()}
    for node, (x, y) in places.items():
        _draw_box(picture, node, x, y)
        for child in node.children:
            picture.line(_curve(x + _width(node), y, *places[child]))


def _arranged(nodes: Sequence[Node]) -> dict[Node, float]:
    """Return the row of each job; a parent stands in the middle of its children."""
    igraph = _require_igraph()
    numbers = {node: number for number, node in enumerate(nodes)}
    lines = [(numbers[node.parent], number) for node, number in numbers.items() if node.parent is not None]
    roots = [number for node, number in numbers.items() if node.parent is None]
    arranged = igraph.Graph(len(nodes), lines, directed=True).layout_reingold_tilford(mode="out", root=roots).coords
    first = min(row for row, _ in arranged)
    return {node: row - first for node, (row, _) in zip(nodes, arranged, strict=True)}


def _require_igraph() -> Any:
    try:
        import igraph
    except ImportError as error:
        raise DrawingLibraryMissingError(
            'Drawing the graph needs the library igraph: pip install "celery-sidejob[graph]"'
        ) from error
    return igraph


def _draw_box(picture: Picture, node: Node, x: float, y: float) -> None:
    group, width = picture.job(node, x, y), _width(node)
    if node.recovered:
        outline = {"x": -3.5, "y": -BOX_HEIGHT / 2 - 3.5, "width": width + 7, "height": BOX_HEIGHT + 7, "rx": 9}
        picture.add(group, "rect", fill=PAPER, stroke=RECOVERED, stroke_width=2, **outline)
    picture.add(group, "rect", x=0, y=-BOX_HEIGHT / 2, width=width, height=BOX_HEIGHT, rx=6, fill=node.colour)
    label = {"x": width / 2, "y": BOX_FONT * 0.35, "text_anchor": "middle"}
    picture.add(group, "text", node.shown, font_size=BOX_FONT, fill=PAPER, **label)
    picture.reach(x + width, y + BOX_HEIGHT / 2)


def _curve(left: float, y1: float, right: float, y2: float) -> str:
    """Return a line that is straight to the end of the parent's column, so that those of siblings bend at one place."""
    bend, middle = right - COLUMN_GAP, right - COLUMN_GAP / 2
    return f"M{left:.1f},{y1:.1f} H{bend:.1f} C{middle:.1f},{y1:.1f} {middle:.1f},{y2:.1f} {right:.1f},{y2:.1f}"


def _width(node: Node) -> float:
    return text_width(node.shown, BOX_FONT) + 20
