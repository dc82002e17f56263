"""Many jobs: an indented list in columns, in which most of those without children are dots beside their parent's name.

The picture stays legible at its own size, and about as wide as high, up to some thousands of jobs. What a person may
want to look at has a row of its own: jobs that have children, that failed, or that were recovered; and others while
there is room.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from celery_sidejob.model.status import Status

from .node import Node, text_width
from .picture import DOT, FAINT, INK, RING, Picture, add

BOLD = 1.08
"""How much wider bold letters are."""
FONT_SIZE, ROW, INDENT, COLUMN_GAP = 11.0, 17.0, 14.0, 36.0
PITCH = 9.0
"""From one dot of a group to the next."""
FEWEST_DOTS = 14
"""Room for dots in a line, however long the label before it."""
NARROWEST = 380.0
"""A column that has dots; else it is as wide as its longest label."""
DEEPEST = 560.0
"""Indentation of the lowest level, at most, in pixels: a long chain is indented less."""
MOST_ROWS = 240
"""Rows up to which jobs without children are labelled as well, those of small families first."""
MOST_REMARKABLE = 5
"""How many childless jobs of a family have a row of their own because of what happened to them."""
ASPECT = 1.5
LONGEST_PATH = 4
"""Names above a column."""


@dataclass(slots=True, eq=False)
class _Row:
    """A labelled job, with the unlabelled ones among its children, and where it is drawn."""

    node: Node
    folded: list[Node]
    column: int = 0
    x: float = 0.0
    y: float = 0.0
    dots_from: float = 0.0
    below: list[_Row] = field(default_factory=list)

    def lines(self, width: float) -> int:
        return math.ceil(len(self.folded) / self.per_line(width)) if self.folded else 1

    def per_line(self, width: float) -> int:
        return max(FEWEST_DOTS, int((width - self.dots_from) / PITCH))

    def height(self, width: float) -> float:
        return ROW + (self.lines(width) - 1) * PITCH


def draw_columns(picture: Picture, nodes: Sequence[Node]) -> None:
    """Draw a dot for each job, labelled where it has a row, and lines from the rows of parents to their children's."""
    rows = list(_rows(nodes))
    indent = min(INDENT, DEEPEST / max(1, max(row.node.level for row in rows)))
    for row in rows:
        row.x = row.node.level * indent + RING
        row.dots_from = row.x + RING + 2 + text_width(row.node.shown, FONT_SIZE) * BOLD + PITCH
    least = NARROWEST if any(row.folded for row in rows) else 0.0
    width = max(least, *(row.dots_from + min(len(row.folded), FEWEST_DOTS) * PITCH for row in rows))
    bottoms = _place(rows, width)
    for row in rows:
        _draw_row(picture, row, row.column * (width + COLUMN_GAP), width)
        _draw_lines(picture, row, bottoms, width + COLUMN_GAP, indent)
    for above, below in pairwise(rows):
        if above.column != below.column:
            _draw_path(picture, below, below.column * (width + COLUMN_GAP))
    if any(row.folded for row in rows):
        picture.note = "Dots beside a name are its children that have none themselves: point at one to see which it is."
    picture.reach(len(bottoms) * (width + COLUMN_GAP) - COLUMN_GAP, max(bottoms))


def _rows(nodes: Sequence[Node]) -> Iterator[_Row]:
    """Yield the rows in the order of the tree."""
    folded = _folded(nodes)
    rows: dict[Node, _Row] = {}
    for node in nodes:
        if node in folded:
            continue
        row = rows[node] = _Row(node, [child for child in node.children if child in folded])
        if node.parent is not None:
            rows[node.parent].below.append(row)
        yield row


def _folded(nodes: Sequence[Node]) -> set[Node]:
    """Return the jobs that get no label."""
    families: defaultdict[Node, list[Node]] = defaultdict(list)
    remarkable: Counter[Node] = Counter()
    for node in nodes:
        if node.parent is None or node.children:
            continue
        is_remarkable = node.recovered is not None or node.status == Status.FAILED
        if is_remarkable and remarkable[node.parent] < MOST_REMARKABLE:
            remarkable[node.parent] += 1
        else:
            families[node.parent].append(node)
    room = MOST_ROWS - len(nodes) + sum(map(len, families.values()))
    folded: set[Node] = set()
    for family in sorted(families.values(), key=len):
        room -= len(family)
        if room < 0:
            folded.update(family)
    return folded


def _place(rows: Sequence[_Row], width: float) -> list[float]:
    """Give each row its column and its middle; returns where each column ends."""
    total = sum(row.height(width) for row in rows)
    columns = max(1, round(math.sqrt(ASPECT * total / (width + COLUMN_GAP))))
    total += (columns - 1) * ROW
    bottoms = [0.0]
    for row in rows:
        height = row.height(width)
        if len(bottoms) < columns and bottoms[-1] + height / 2 > total / columns:
            bottoms.append(ROW)  # below the path that leads here
        row.column, row.y = len(bottoms) - 1, bottoms[-1] + ROW / 2
        bottoms[-1] += height
    return bottoms


def _draw_row(picture: Picture, row: _Row, left: float, width: float) -> None:
    group = picture.dot(row.node, left + row.x, row.y)
    label = {"x": RING + 2, "y": FONT_SIZE * 0.35, "font_size": FONT_SIZE}
    weight = {"font_weight": "bold"} if row.node.children else {}
    add(group, "text", row.node.shown, fill=INK, **label, **weight)
    per_line = row.per_line(width)
    for place, node in enumerate(row.folded):
        line, place_in_line = divmod(place, per_line)
        picture.dot(node, left + row.dots_from + place_in_line * PITCH + DOT, row.y + line * PITCH)


def _draw_lines(picture: Picture, row: _Row, bottoms: Sequence[float], step: float, indent: float) -> None:
    """Draw from a job's dot down, through all columns between, and to the right to each row of its children."""
    if not row.below:
        return
    last = row.below[-1]
    path = []
    for column in range(row.column, last.column + 1):
        top = row.y if column == row.column else ROW
        bottom = last.y if column == last.column else bottoms[column]
        path.append(f"M{column * step + row.x:.1f},{top:.1f} V{bottom:.1f}")
    path += [
        f"M{child.column * step + row.x:.1f},{child.y:.1f} H{child.column * step + child.x:.1f}" for child in row.below
    ]
    picture.line(" ".join(path))


def _draw_path(picture: Picture, row: _Row, left: float) -> None:
    """Say above a column whose rows it goes on with."""
    names: list[str] = []
    parent = row.node.parent
    while parent is not None and len(names) < LONGEST_PATH:
        names.append(parent.shown)
        parent = parent.parent
    text = " / ".join([*(["…"] if parent else []), *reversed(names)])
    picture.text(text, x=left, y=ROW / 2 + FONT_SIZE * 0.35, font_size=FONT_SIZE, fill=FAINT, font_style="italic")
