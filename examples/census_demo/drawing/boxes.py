"""Few jobs: labelled boxes from left to right, arranged as Reingold and Tilford do it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from .node import Node, text_width
from .picture import PAPER, RECOVERED, Picture, add

BOX_FONT, BOX_HEIGHT, ROW, COLUMN_GAP = 13.0, 24.0, 34.0, 56.0


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


Outline = list[tuple[float, float]]
"""The first and the last row that a family takes at each level from its eldest on, whose row is 0."""


def _arranged(nodes: Sequence[Node]) -> dict[Node, float]:
    """Return the row of each job; a parent stands in the middle of its children, families as close as they fit."""
    outlines: dict[Node, Outline] = {}
    below: dict[Node, float] = {}
    """How many rows below its parent a job is, or a root below the first."""
    for node in reversed(nodes):  # children before their parents
        families = [outlines.pop(child) for child in node.children]
        rows = _stacked(families)
        middle = (rows[0] + rows[-1]) / 2 if rows else 0.0
        rows = [row - middle for row in rows]
        below.update(zip(node.children, rows, strict=True))
        outlines[node] = [(0.0, 0.0), *_outline(families, rows)]
    roots = [node for node in nodes if node.parent is None]
    below.update(zip(roots, _stacked([outlines[root] for root in roots]), strict=True))
    arranged: dict[Node, float] = {}
    for node in nodes:
        arranged[node] = below[node] + (arranged[node.parent] if node.parent is not None else 0.0)
    first = min(arranged.values())
    return {node: row - first for node, row in arranged.items()}


def _stacked(families: Sequence[Outline]) -> list[float]:
    """Return the rows of families' eldest, one below the other, so that at no level two share a row."""
    rows: list[float] = []
    last: list[float] = []
    for family in families:
        row = max((bottom + 1 - top for bottom, (top, _) in zip(last, family, strict=False)), default=0.0)
        rows.append(row)
        last[: len(family)] = [row + bottom for _, bottom in family]
    return rows


def _outline(families: Sequence[Outline], rows: Sequence[float]) -> Outline:
    """Return the outline of families together, whose eldest are in these rows."""
    outline: Outline = []
    for level in range(max(map(len, families), default=0)):
        reaching = [(row, family[level]) for row, family in zip(rows, families, strict=True) if level < len(family)]
        outline.append((min(row + top for row, (top, _) in reaching), max(row + last for row, (_, last) in reaching)))
    return outline


def _draw_box(picture: Picture, node: Node, x: float, y: float) -> None:
    group, width = picture.job(node, x, y), _width(node)
    if node.recovered:
        outline = {"x": -3.5, "y": -BOX_HEIGHT / 2 - 3.5, "width": width + 7, "height": BOX_HEIGHT + 7, "rx": 9}
        add(group, "rect", fill=PAPER, stroke=RECOVERED, stroke_width=2, **outline)
    add(group, "rect", x=0, y=-BOX_HEIGHT / 2, width=width, height=BOX_HEIGHT, rx=6, fill=node.colour)
    label = {"x": width / 2, "y": BOX_FONT * 0.35, "text_anchor": "middle"}
    add(group, "text", node.shown, font_size=BOX_FONT, fill=PAPER, **label)
    picture.reach(x + width, y + BOX_HEIGHT / 2)


def _curve(left: float, y1: float, right: float, y2: float) -> str:
    """Return a line that is straight to the end of the parent's column, so that those of siblings bend at one place."""
    bend, middle = right - COLUMN_GAP, right - COLUMN_GAP / 2
    return f"M{left:.1f},{y1:.1f} H{bend:.1f} C{middle:.1f},{y1:.1f} {middle:.1f},{y2:.1f} {right:.1f},{y2:.1f}"


def _width(node: Node) -> float:
    return text_width(node.shown, BOX_FONT) + 20
