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
from typing import Any
from xml.etree import ElementTree as ET

from ..model.errors import SideJobError
from ..model.status import Status

SVG = "http://www.w3.org/2000/svg"

COLOURS = {
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
INK, FAINT, LINE, PAPER = "#1f2933", "#52606d", "#c3cad3", "#ffffff"
FONT = "Inter, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"

TALLEST = 60
"""Rows up to which jobs are boxes from left to right."""
LONGEST_LABEL = 40
"""Characters of a label in the drawing; the tooltip has all of them."""
MARGIN = 24.0
WIDEST = 1600.0
"""Pixels at which a viewer shows a larger picture at first; it is vectors, so one can zoom into it."""

BOX_FONT, BOX_HEIGHT, ROW, COLUMN_GAP = 13.0, 24.0, 34.0, 56.0
DOT_FONT, DOT, SPOKE_GAP, RING_GAP = 9.0, 4.5, 12.0, 70.0


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
    any row, and OSError if the file cannot be written: an older one is then as it was.
    """
    igraph = require_igraph()
    nodes = _nodes(rows)
    graph = igraph.Graph(len(nodes), [(node.parent, i) for i, node in enumerate(nodes) if node.parent is not None])
    graph.to_directed("acyclic")
    roots = [i for i, node in enumerate(nodes) if node.parent is None]
    arranged = graph.layout_reingold_tilford(mode="out", root=roots).coords
    top, first = min(y for _, y in arranged), min(x for x, _ in arranged)
    for node, (x, y) in zip(nodes, arranged, strict=True):
        node.rank, node.level = x - first, round(y - top)
    rings = max(node.rank for node in nodes) + 1 > TALLEST
    (_place_on_rings if rings else _place_in_columns)(nodes)
    picture = _write(igraph, graph, nodes)
    _dress(picture, nodes, rings)
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

    @property
    def shown(self) -> str:
        return self.label if len(self.label) <= LONGEST_LABEL else self.label[: LONGEST_LABEL - 1] + "…"

    @property
    def colour(self) -> str:
        return COLOURS.get(self.status, UNKNOWN)  # type: ignore[call-overload, no-any-return]  # a str is found as well

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
    """Bend the ranks to a full circle; each ring is as small as its closest neighbours and the labels inside allow."""
    turn = 2 * math.pi / (max(node.rank for node in nodes) + 1)
    levels: list[list[_Node]] = [[] for _ in range(max(node.level for node in nodes) + 1)]
    for node in nodes:
        levels[node.level].append(node)
    radius = inner = 0.0
    for level in levels:
        ranks = sorted(node.rank for node in level)
        closest = min((after - before for before, after in zip(ranks, ranks[1:], strict=False)), default=0.0)
        needed = SPOKE_GAP / (turn * closest) if closest else 0.0
        radius = max(needed, radius + inner)
        for node in level:
            node.angle = node.rank * turn - math.pi / 2
            node.x, node.y = radius * math.cos(node.angle), radius * math.sin(node.angle)
        longest = max((_text_width(node.shown, DOT_FONT) for node in level), default=0.0)
        inner = RING_GAP + longest


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
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


# -- the drawing ------------------------------------------------------------------------------------------------------


def _write(igraph: Any, graph: Any, nodes: Sequence[_Node]) -> ET.Element:
    """Have igraph write the drawing, at its scale of one, and return its root element."""
    layout = igraph.Layout([(node.x, node.y) for node in nodes])
    box = layout.bounding_box()
    written = io.StringIO()
    graph.write_svg(
        written,
        layout=layout,
        width=box.width + 2,
        height=box.height + 2,
        vertex_size=1,
        labels=[""] * len(nodes),  # igraph does not escape them
        colors=[node.colour for node in nodes],
        edge_colors=[LINE] * graph.ecount(),
    )
    return ET.fromstring(written.getvalue())


def _dress(picture: ET.Element, nodes: Sequence[_Node], rings: bool) -> None:
    """Replace igraph's plain lines and discs, and add paper, tooltips and a legend."""
    edges = [path for path in picture.iter(f"{{{SVG}}}path") if path.get("id", "").startswith("path")]
    # Markers of arrows have such ids too; only lines say which nodes they join.
    joined = [(_end(path, "start"), _end(path, "end")) for path in edges if _end(path, "start") is not None]
    picture.clear()
    lines = _add(picture, "g", fill="none", stroke=LINE, stroke_width=1.4)
    for above, below in joined:
        assert above is not None
        assert below is not None
        _add(lines, "path", d=_curve(nodes[above], nodes[below], rings))
    size = DOT_FONT if rings else BOX_FONT
    jobs = _add(picture, "g", font_family=FONT, font_size=size)
    for node in nodes:
        (_add_dot if rings else _add_box)(jobs, node)
    _frame(picture, nodes, rings)


def _end(path: ET.Element, which: str) -> int | None:
    """Return the index of the node at an end of a line that igraph wrote."""
    named = next((value for key, value in path.attrib.items() if key.endswith(f"}}connection-{which}")), None)
    return None if named is None else int(named.removeprefix("#g"))


def _curve(above: _Node, below: _Node, rings: bool) -> str:
    if not rings:
        x, y, end = above.x + above.box_width, above.y, below.x
        middle = (below.x + x) / 2 if below.x - x < COLUMN_GAP else below.x - COLUMN_GAP / 2
        return f"M{x:.1f},{y:.1f} L{middle - COLUMN_GAP / 2:.1f},{y:.1f} " * (middle - COLUMN_GAP / 2 > x) + (
            f"M{max(x, middle - COLUMN_GAP / 2):.1f},{y:.1f} "
            f"C{middle:.1f},{y:.1f} {middle:.1f},{below.y:.1f} {end:.1f},{below.y:.1f}"
        )
    # Along the spokes at both ends, as in a radial dendrogram.
    between = (math.hypot(above.x, above.y) + math.hypot(below.x, below.y)) / 2
    x1, y1 = between * math.cos(above.angle), between * math.sin(above.angle)
    x2, y2 = between * math.cos(below.angle), between * math.sin(below.angle)
    if not above.x and not above.y:
        x1, y1 = x2, y2
    return f"M{above.x:.1f},{above.y:.1f} C{x1:.1f},{y1:.1f} {x2:.1f},{y2:.1f} {below.x:.1f},{below.y:.1f}"


def _add_box(jobs: ET.Element, node: _Node) -> None:
    group = _add_job(jobs, node)
    top = node.y - BOX_HEIGHT / 2
    _add(group, "rect", x=node.x, y=top, width=node.box_width, height=BOX_HEIGHT, rx=6, fill=node.colour)
    middle = node.x + node.box_width / 2
    _add(group, "text", node.shown, x=middle, y=node.y + BOX_FONT * 0.35, fill=PAPER, text_anchor="middle")


def _add_dot(jobs: ET.Element, node: _Node) -> None:
    group = _add_job(jobs, node)
    _add(group, "circle", cx=node.x, cy=node.y, r=DOT if node.is_leaf else DOT * 1.5, fill=node.colour)
    # Leaves are labelled outwards, the others inwards, where fewer lines are; text is never upside down.
    outwards, right = node.is_leaf, math.cos(node.angle) >= -1e-9
    away = DOT * 2 if outwards == right else -DOT * 2
    degrees = math.degrees(node.angle) + (0 if right else 180)
    text = _add(group, "text", node.shown, x=away, y=DOT_FONT * 0.35, fill=INK)
    text.set("text-anchor", "start" if outwards == right else "end")
    text.set("transform", f"translate({node.x:.1f},{node.y:.1f}) rotate({degrees:.2f})")


def _add_job(jobs: ET.Element, node: _Node) -> ET.Element:
    group = _add(jobs, "g", id=f"job{node.id}", **{"class": f"job {node.status}"})
    _add(group, "title", f"job {node.id}: {node.label} ({node.status})")
    return group


def _frame(picture: ET.Element, nodes: Sequence[_Node], rings: bool) -> None:
    """Put paper and a legend behind and above the drawing, and say how large it all is."""
    reach = max(_text_width(node.shown, DOT_FONT) for node in nodes) + 3 * DOT if rings else BOX_HEIGHT / 2
    left = min(node.x for node in nodes) - (reach if rings else 0)
    right = max(node.x + (reach if rings else node.box_width) for node in nodes)
    top, bottom = min(node.y for node in nodes) - reach, max(node.y for node in nodes) + reach
    legend_height, legend_width = _add_legend(picture, nodes, left, top, max(right - left, bottom - top))
    top -= legend_height
    right = max(right, left + legend_width)
    x, y = left - MARGIN, top - MARGIN
    width, height = right - left + 2 * MARGIN, bottom - top + 2 * MARGIN
    paper = ET.Element(f"{{{SVG}}}rect", _attributes(x=x, y=y, width=width, height=height, fill=PAPER))
    picture.insert(0, paper)
    shrunk = min(1.0, WIDEST / max(width, height))
    for key, value in _attributes(
        viewBox=f"{x:.1f} {y:.1f} {width:.1f} {height:.1f}", width=width * shrunk, height=height * shrunk
    ).items():
        picture.set(key, value)


def _add_legend(
    picture: ET.Element, nodes: Sequence[_Node], left: float, top: float, extent: float
) -> tuple[float, float]:
    """Say above the drawing what the colours mean; returns (height, width). It grows with the picture."""
    size = max(13.0, extent / 90)
    legend = _add(picture, "g", font_family=FONT, font_size=size)
    middle = top - size * 1.6
    x = left
    total = f"{len(nodes)} job{'s' if len(nodes) > 1 else ''}"
    _add(legend, "text", total, x=x, y=middle + size * 0.35, fill=INK, font_weight="bold")
    x += _text_width(total, size) * 1.1 + size * 1.4
    counts = Counter(node.status for node in nodes)
    known = [str(status) for status in COLOURS if status in counts]
    for status in [*known, *sorted(counts.keys() - set(known))]:
        colour = COLOURS.get(status, UNKNOWN)  # type: ignore[call-overload]  # as above
        _add(legend, "circle", cx=x + size * 0.4, cy=middle, r=size * 0.4, fill=colour)
        text = f"{counts[status]} {status}"
        _add(legend, "text", text, x=x + size * 1.2, y=middle + size * 0.35, fill=FAINT)
        x += _text_width(text, size) + size * 2.6
    return size * 2.6, x - left


def _add(parent: ET.Element, tag: str, text: str | None = None, /, **attributes: Any) -> ET.Element:
    element = ET.SubElement(parent, f"{{{SVG}}}{tag}", _attributes(**attributes))
    element.text = text
    return element


def _attributes(**values: Any) -> dict[str, str]:
    return {
        key.replace("_", "-"): f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
        for key, value in values.items()
    }


def _save(picture: ET.Element, path: str | os.PathLike[str]) -> None:
    ET.register_namespace("", SVG)
    text = ET.tostring(picture, encoding="unicode", xml_declaration=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write('<?xml version="1.0" encoding="UTF-8"?>\n' + text + "\n")
