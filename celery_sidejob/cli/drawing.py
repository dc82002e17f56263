"""The picture of a graph of jobs, as an SVG.

igraph arranges the jobs (Reingold-Tilford) and writes the drawing; this module chooses the places and dresses what was
written: up to `TALLEST` rows are labelled boxes from left to right, more are dots on rings around the root, labelled
along their spokes, so that a fan of a thousand jobs is still one picture.
"""

from __future__ import annotations

import io
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from ..model.errors import SideJobError
from ..model.status import Status

SVG = "http://www.w3.org/2000/svg"

COLOURS: dict[str, str] = {
    Status.QUEUED: "#8aa4c8",
    Status.RUNNING: "#1f78d1",
    Status.SUSPENDED: "#e3a008",
    Status.COMPLETED: "#2f9e5f",
    Status.FAILED: "#d64545",
    Status.TERMINATING: "#a05fc4",
    Status.TERMINATED: "#6b7280",
}
"""A colour for each status; anything else is `UNKNOWN`."""
UNKNOWN = "#b8bec8"
INK, FAINT, LINE, PAPER = "#1f2933", "#52606d", "#cbd2da", "#ffffff"
FONT = "Inter, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"

TALLEST = 60
"""Rows up to which jobs are boxes from left to right."""
LONGEST_LABEL = 40
"""Characters of a label in the drawing; the tooltip has all of them."""
MANY = 400
"""Jobs from which lines are thin."""
MARGIN = 24.0
WIDEST = 1600.0
"""Pixels at which a viewer first shows rings that are larger: vectors can be zoomed into. Boxes are always legible."""

BOX_FONT, BOX_HEIGHT, ROW, COLUMN_GAP = 13.0, 24.0, 34.0, 56.0
DOT_FONT, DOT, SPOKE_GAP, RING_GAP = 10.0, 4.5, 12.0, 60.0
LARGEST_RING = 600.0
"""A ring that would have to be larger than this for all its labels is staggered instead."""
SMALLEST_CROWDED_RING = 300.0


class DrawingLibraryMissingError(SideJobError, ImportError):
    """Drawing was asked for without igraph: ``pip install "celery-sidejob[graph]"``."""


def require_igraph() -> Any:
    """Return the module igraph; DrawingLibraryMissingError says how to install it."""
    try:
        import igraph
    except ImportError as error:
        raise DrawingLibraryMissingError(
            'Drawing the graph needs the library igraph: pip install "celery-sidejob[graph]"'
        ) from error
    return igraph


def draw_tree(rows: Iterable[tuple[int, int | None, str, str]], path: str | os.PathLike[str]) -> int:
    """Draw jobs, given as (id, parent id, label, status), into an SVG file, and return how many they were.

    A job whose parent is not among the rows is a root; siblings keep the order of the rows. Raises ValueError without
    any row, and OSError if the file cannot be written.
    """
    igraph = require_igraph()
    nodes = _nodes(rows)
    lines = [(node.parent, i) for i, node in enumerate(nodes) if node.parent is not None]
    graph = igraph.Graph(len(nodes), lines, directed=True)
    roots = [i for i, node in enumerate(nodes) if node.parent is None]
    arranged = graph.layout_reingold_tilford(mode="out", root=roots).coords
    top, first = min(y for _, y in arranged), min(x for x, _ in arranged)
    for node, (x, y) in zip(nodes, arranged, strict=True):
        node.rank, node.level = x - first, round(y - top)
    rings = max(node.rank for node in nodes) + 1 > TALLEST
    (_place_on_rings if rings else _place_in_columns)(nodes)
    picture = _write(igraph, graph, nodes, rings)
    _dress(picture, graph, nodes, rings)
    _save(picture, path)
    return len(nodes)


@dataclass(slots=True)
class _Node:
    """One job: where igraph put it (`rank` along its level), and where it is drawn."""

    id: int
    parent: int | None
    label: str
    status: str
    is_leaf: bool = True
    rank: float = 0.0
    level: int = 0
    x: float = 0.0
    y: float = 0.0
    angle: float = 0.0
    """Direction of its spoke, in radians."""
    is_labelled: bool = True

    @property
    def shown(self) -> str:
        return self.label if len(self.label) <= LONGEST_LABEL else self.label[: LONGEST_LABEL - 1] + "…"

    @property
    def colour(self) -> str:
        return COLOURS.get(self.status, UNKNOWN)

    @property
    def box_width(self) -> float:
        return _text_width(self.shown, BOX_FONT) + 20


def _nodes(rows: Iterable[tuple[int, int | None, str, str]]) -> list[_Node]:
    given = {row[0]: row for row in rows}
    if not given:
        raise ValueError("There is nothing to draw: no rows were given.")
    places = {job_id: place for place, job_id in enumerate(given)}
    nodes = [
        _Node(job_id, None if parent is None else places.get(parent), _printable(label), str(status))
        for job_id, parent, label, status in given.values()
    ]
    for node in nodes:
        if node.parent is not None:
            nodes[node.parent].is_leaf = False
    return nodes


# -- places -----------------------------------------------------------------------------------------------------------


def _place_in_columns(nodes: Sequence[_Node]) -> None:
    """Give each level a column as wide as its longest label; x is a box's left edge, y its middle."""
    widths: Counter[int] = Counter()
    for node in nodes:
        widths[node.level] = max(widths[node.level], math.ceil(node.box_width))
    lefts = [0.0]
    for level in range(max(widths)):
        lefts.append(lefts[-1] + widths[level] + COLUMN_GAP)
    for node in nodes:
        node.x, node.y = lefts[node.level], node.rank * ROW


def _place_on_rings(nodes: Sequence[_Node]) -> None:
    """Bend the ranks to a full circle, each level a ring around the last.

    A level that needs more room than its ring has is staggered over several, without the labels of its leaves: else
    the picture would grow with the number of jobs and not with its root, and be a thin line around nothing.
    """
    crowded = max(SMALLEST_CROWDED_RING, SPOKE_GAP * math.sqrt(len(nodes)))
    widest = max(node.rank for node in nodes) + 1
    # Where the circle closes there is a gap for as many as may stand behind one another.
    turn = 2 * math.pi / (widest + math.ceil(widest * SPOKE_GAP / (2 * math.pi * crowded)))
    levels: list[list[_Node]] = [[] for _ in range(max(node.level for node in nodes) + 1)]
    for node in sorted(nodes, key=lambda node: node.rank):
        levels[node.level].append(node)
    radius = 0.0 if len(levels[0]) == 1 else RING_GAP
    for level in levels:
        longest = max((_text_width(node.shown, DOT_FONT) for node in level if not node.is_leaf), default=0.0)
        if radius:
            radius += longest  # the labels of those that have children point inwards
        closest = min((b.rank - a.rank for a, b in pairwise(level)), default=math.inf)
        needed = SPOKE_GAP / (turn * closest)
        radius = max(radius, needed if needed <= LARGEST_RING else min(needed, crowded))
        rings = _place_level(level, radius, turn)
        radius += (rings - 1) * SPOKE_GAP + RING_GAP


def _place_level(level: Sequence[_Node], radius: float, turn: float) -> int:
    """Put each job on the innermost ring where it has room, and return how many rings that took."""
    last: list[float] = []  # the last rank on each ring
    for node in level:
        fits = ((node.rank - rank) * turn * radius > SPOKE_GAP - 1e-6 for rank in last)
        ring = next((ring for ring, has_room in enumerate(fits) if has_room), len(last))
        last[ring : ring + 1] = [node.rank]
        node.angle = node.rank * turn - math.pi / 2 if radius else 0.0
        node.x, node.y = _polar(radius + ring * SPOKE_GAP, node.angle)
        node.is_labelled = ring == 0
    if len(last) > 1:
        for node in level:
            node.is_labelled &= not node.is_leaf
    return len(last)


def _polar(radius: float, angle: float) -> tuple[float, float]:
    return radius * math.cos(angle), radius * math.sin(angle)


def _text_width(text: str, size: float) -> float:
    """Estimate how wide a text is; a little too wide rather than too narrow, for the viewer's font is not known."""
    return size * sum(
        1.0
        if unicodedata.east_asian_width(character) in "WF"
        else 0.36
        if character in "iljtfr.,:;|'!()[] "
        else 0.9
        if character in "mwMW@%"
        else 0.62
        for character in text
    )


def _printable(text: str) -> str:
    """Replace what XML cannot hold, and line breaks."""
    return "".join(
        "\ufffd" if unicodedata.category(character) in ("Cc", "Cs", "Cn") else character for character in text
    )


# -- the drawing ------------------------------------------------------------------------------------------------------


def _write(igraph: Any, graph: Any, nodes: Sequence[_Node], rings: bool) -> ET.Element:
    """Have igraph write the drawing at its scale of one, with the nodes where we put them, and return its root."""
    layout = igraph.Layout([(node.x, node.y) for node in nodes])
    box, size = layout.bounding_box(), DOT if rings else BOX_HEIGHT / 2
    written = io.StringIO()
    graph.write_svg(
        written,
        layout=layout,
        width=box.width + 2 * size,
        height=box.height + 2 * size,
        vertex_size=size,
        labels=[escape(node.shown) for node in nodes],  # igraph writes them as they are
        colors=[node.colour for node in nodes],
        shapes=[1 if rings else 2] * len(nodes),
        edge_colors=[LINE] * graph.ecount(),
        edge_stroke_widths=[1.4] * graph.ecount(),
        font_size=DOT_FONT if rings else BOX_FONT,
    )
    return ET.fromstring(written.getvalue())


def _dress(picture: ET.Element, graph: Any, nodes: Sequence[_Node], rings: bool) -> None:
    """Bend igraph's straight lines, label its nodes where there is room, add tooltips, paper and a legend."""
    layers = picture.findall(f"{{{SVG}}}g")
    picture.remove(picture[0])  # arrowheads: which of two jobs is the parent can be seen
    lines, jobs = layers
    for layer in (picture, lines, jobs):
        _strip(layer)
    _set(lines, fill="none", stroke=LINE, stroke_width=1.4 if len(nodes) < MANY else 0.8)
    for (above, below), line in zip(graph.get_edgelist(), lines, strict=True):
        _strip(line)
        _set(line, d=_curve(nodes[above], nodes[below], rings))
    _set(jobs, font_family=FONT, font_size=DOT_FONT if rings else BOX_FONT)
    for node, group in zip(nodes, jobs, strict=True):
        shape, text = group
        text.text = text[0].text
        text.remove(text[0])
        _strip(text)
        _strip(group)
        _set(group, id=f"job{node.id}", transform=f"translate({node.x:.1f},{node.y:.1f})")
        group.set("class", f"job {node.status}")
        (_dress_dot if rings else _dress_box)(node, shape, text)
        title = ET.Element(f"{{{SVG}}}title")
        title.text = f"job {node.id}: {node.label} ({node.status})"
        group.insert(0, title)
    _frame(picture, nodes, rings)


def _curve(above: _Node, below: _Node, rings: bool) -> str:
    if not rings:
        # Straight to the end of the parent's column, so that lines of siblings bend at one place.
        start, bend = above.x + above.box_width, below.x - COLUMN_GAP
        middle = bend + COLUMN_GAP / 2
        return (
            f"M{start:.1f},{above.y:.1f} H{bend:.1f} "
            f"C{middle:.1f},{above.y:.1f} {middle:.1f},{below.y:.1f} {below.x:.1f},{below.y:.1f}"
        )
    # Along the spokes at both ends; from the centre straight away.
    between = (math.hypot(above.x, above.y) + math.hypot(below.x, below.y)) / 2
    from_centre = not above.x and not above.y
    x1, y1 = _polar(between, below.angle if from_centre else above.angle)
    x2, y2 = _polar(between, below.angle)
    return f"M{above.x:.1f},{above.y:.1f} C{x1:.1f},{y1:.1f} {x2:.1f},{y2:.1f} {below.x:.1f},{below.y:.1f}"


def _dress_box(node: _Node, shape: ET.Element, text: ET.Element) -> None:
    _strip(shape)
    _set(shape, x=0, y=-BOX_HEIGHT / 2, width=node.box_width, height=BOX_HEIGHT, rx=6, fill=node.colour)
    _set(text, x=node.box_width / 2, y=BOX_FONT * 0.35, fill=PAPER, text_anchor="middle")


def _dress_dot(node: _Node, shape: ET.Element, text: ET.Element) -> None:
    if not node.is_leaf:
        _set(shape, r=DOT * 1.25)
    if not node.is_labelled:
        text.text = None
        return
    # Leaves are labelled outwards, the others inwards, where fewer lines are; text is never upside down.
    right = math.cos(node.angle) > -1e-9
    forward = node.is_leaf == right
    degrees = math.degrees(node.angle) + (0 if right else 180)
    _set(text, x=DOT * 2 if forward else -DOT * 2, y=DOT_FONT * 0.35, fill=INK, transform=f"rotate({degrees:.2f})")
    _set(text, text_anchor="start" if forward else "end")


def _frame(picture: ET.Element, nodes: Sequence[_Node], rings: bool) -> None:
    """Put paper and a legend behind and above the drawing, and say how large it all is."""
    labels = (_text_width(node.shown, DOT_FONT) for node in nodes if node.is_leaf and node.is_labelled)
    reach = max(labels, default=0.0) + 3 * DOT if rings else BOX_HEIGHT / 2
    left = min(node.x for node in nodes) - (reach if rings else 0)
    right = max(node.x + (reach if rings else node.box_width) for node in nodes)
    top, bottom = min(node.y for node in nodes) - reach, max(node.y for node in nodes) + reach
    # Rings are shown whole, however large they are, so their legend grows with them.
    size = max(BOX_FONT, (right - left) / 90) if rings else BOX_FONT
    legend_height, legend_width = _add_legend(picture, nodes, left, top, size)
    top -= legend_height
    right = max(right, left + legend_width)
    x, y = left - MARGIN, top - MARGIN
    width, height = right - left + 2 * MARGIN, bottom - top + 2 * MARGIN
    paper = ET.Element(f"{{{SVG}}}rect")
    _set(paper, x=x, y=y, width=width, height=height, fill=PAPER)
    picture.insert(0, paper)
    shrunk = min(1.0, WIDEST / max(width, height)) if rings else 1.0
    _set(picture, viewBox=f"{x:.1f} {y:.1f} {width:.1f} {height:.1f}", width=width * shrunk, height=height * shrunk)


def _add_legend(
    picture: ET.Element, nodes: Sequence[_Node], left: float, top: float, size: float
) -> tuple[float, float]:
    """Say above the drawing what the colours mean; returns (height, width)."""
    legend = ET.SubElement(picture, f"{{{SVG}}}g")
    _set(legend, font_family=FONT, font_size=size)
    middle = top - size * 1.6
    x = left
    total = f"{len(nodes)} job{'s' if len(nodes) > 1 else ''}"
    _add(legend, "text", total, x=x, y=middle + size * 0.35, fill=INK, font_weight="bold")
    x += _text_width(total, size) * 1.1 + size * 1.4
    counts = Counter(node.status for node in nodes)
    known = [str(status) for status in COLOURS if status in counts]
    for status in [*known, *sorted(counts.keys() - set(known))]:
        colour = COLOURS.get(status, UNKNOWN)
        _add(legend, "circle", cx=x + size * 0.4, cy=middle, r=size * 0.4, fill=colour)
        text = f"{counts[status]} {status}"
        _add(legend, "text", text, x=x + size * 1.2, y=middle + size * 0.35, fill=FAINT)
        x += _text_width(text, size) + size * 2.6
    return size * 2.6, x - left


def _add(parent: ET.Element, tag: str, text: str | None = None, /, **attributes: Any) -> None:
    element = ET.SubElement(parent, f"{{{SVG}}}{tag}")
    element.text = text
    _set(element, **attributes)


def _set(element: ET.Element, **attributes: Any) -> None:
    for name, value in attributes.items():
        text = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
        element.set(name if name == "viewBox" else name.replace("_", "-"), text)


def _strip(element: ET.Element) -> None:
    """Remove what igraph says to Inkscape, and styles, which would win over attributes."""
    element.attrib.clear()


def _save(picture: ET.Element, path: str | os.PathLike[str]) -> None:
    ET.register_namespace("", SVG)
    text = ET.tostring(picture, encoding="unicode", xml_declaration=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write('<?xml version="1.0" encoding="UTF-8"?>\n' + text + "\n")
