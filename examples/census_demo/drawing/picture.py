"""The drawing itself: its elements, its paper, its title and its legend."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

from celery_sidejob.model.printable import counted

from .node import COLOURS, UNKNOWN, Node, printable, text_width

SVG = "http://www.w3.org/2000/svg"
FONT = "Inter, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, FAINT, LINE, PAPER = "#1f2933", "#52606d", "#cbd2da", "#ffffff"
RECOVERED = "#f26a1b"
"""The ring around what was recovered."""

DOT = 3.5
RING = 6.0
"""Radius of a job's dot, and of that ring."""
MARGIN = 24.0
TITLE_FONT, LEGEND_FONT = 18.0, 13.0
LONGEST_TITLE = 100
"""Characters of a title."""
LINE_HEIGHT = 1.7
NARROWEST = 640.0
"""Pixels at which the legend is broken into lines, if the drawing is not wider."""


class Picture:
    """An SVG that grows to the right and downwards from (0, 0); `frame` puts paper, title and legend around it."""

    def __init__(self) -> None:
        self._root = ET.Element("svg", xmlns=SVG)
        self._lines = add(self._root, "g", fill="none", stroke=LINE, stroke_width=1.2)
        self._jobs = add(self._root, "g", font_family=FONT)
        self._right = self._bottom = 0.0
        self.note = ""
        """Further lines of the legend."""

    def reach(self, x: float, y: float) -> None:
        """Extend the drawing to this point."""
        self._right, self._bottom = max(self._right, x), max(self._bottom, y)

    def line(self, path: str) -> None:
        """Draw a line along a path, behind all jobs."""
        add(self._lines, "path", d=path)

    def text(self, text: str, **attributes: Any) -> None:
        """Write a text that does not belong to a job."""
        add(self._jobs, "text", text, **attributes)

    def job(self, node: Node, x: float, y: float) -> ET.Element:
        """Add an empty group for a job at its place, with its tooltip, and return it for `add`."""
        group = add(self._jobs, "g", id=f"job{node.id}", transform=f"translate({_number(x)},{_number(y)})")
        group.set("class", f"job {node.status}" + (" recovered" if node.recovered else ""))
        add(group, "title", node.tooltip)
        return group

    def dot(self, node: Node, x: float, y: float) -> ET.Element:
        """Add a job as a dot, with a ring around it if it was recovered, and return its group."""
        group = self.job(node, x, y)
        _dot(group, node.colour, recovered=node.recovered is not None)
        return group

    def frame(self, nodes: Sequence[Node], title: str) -> None:
        """Add the background, the title and the legend, and set the size."""
        total = counted(len(nodes), "job", "jobs")
        heading = f"{_cut_in_the_middle(printable(title))}: {total}" if title else total
        first = ET.Element("title")
        first.text = heading
        self._root.insert(0, first)
        above = add(self._root, "g", font_family=FONT)
        self._right = max(self._right, text_width(heading, TITLE_FONT) * 1.05)
        legend = _legend(nodes, max(self._right, NARROWEST))
        self._right = max(self._right, *(x + _entry_width(text) for _, text, x, _ in legend))
        lines = legend[-1][3] + (2 if self.note else 1)
        height = (TITLE_FONT + lines * LEGEND_FONT) * LINE_HEIGHT + LEGEND_FONT
        add(above, "text", heading, x=0, y=TITLE_FONT - height, font_size=TITLE_FONT, font_weight="bold", fill=INK)
        _draw_legend(above, legend, height)
        if self.note:
            y = -(LEGEND_FONT + 0.4 * LEGEND_FONT * LINE_HEIGHT) + LEGEND_FONT * 0.35
            add(above, "text", self.note, x=0.0, y=y, font_size=LEGEND_FONT, fill=FAINT)
            self._right = max(self._right, text_width(self.note, LEGEND_FONT))
        box = (-MARGIN, -height - MARGIN, self._right + 2 * MARGIN, self._bottom + height + 2 * MARGIN)
        paper = ET.Element("rect", dict(zip(("x", "y", "width", "height"), map(_number, box), strict=True)), fill=PAPER)
        self._root.insert(1, paper)
        self._root.set("viewBox", " ".join(map(_number, box)))
        self._root.set("width", _number(box[2]))
        self._root.set("height", _number(box[3]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file."""
        text = ET.tostring(self._root, encoding="unicode", xml_declaration=False)
        with open(path, "w", encoding="utf-8") as file:
            file.write('<?xml version="1.0" encoding="UTF-8"?>\n' + text + "\n")


def _cut_in_the_middle(title: str) -> str:
    """Return a title, cut in the middle if it is too long: the end of a path identifies it."""
    half = LONGEST_TITLE // 2
    return title if len(title) <= LONGEST_TITLE else f"{title[:half]}…{title[-half + 1 :]}"


def _draw_legend(above: ET.Element, legend: Sequence[tuple[str, str, float, int]], height: float) -> None:
    for colour, text, x, line in legend:
        y = (TITLE_FONT + (line + 0.6) * LEGEND_FONT) * LINE_HEIGHT - height
        sample = add(above, "g", transform=f"translate({_number(x + RING)},{_number(y)})")
        _dot(sample, colour, recovered=colour == RECOVERED)
        add(sample, "text", text, x=RING + 4, y=LEGEND_FONT * 0.35, font_size=LEGEND_FONT, fill=FAINT)


def _legend(nodes: Sequence[Node], widest: float) -> list[tuple[str, str, float, int]]:
    """Return the legend of the colours, each as (colour, text, x, line)."""
    counts = Counter(node.status for node in nodes)
    known = [str(status) for status in COLOURS if status in counts]
    entries = [
        (COLOURS.get(status, UNKNOWN), f"{counts[status]:,} {status}")
        for status in [*known, *sorted(counts.keys() - set(known))]
    ]
    recovered = sum(node.recovered is not None for node in nodes)
    if recovered:
        entries.append((RECOVERED, f"{recovered:,} recovered: a run of {'it' if recovered == 1 else 'each'} was lost"))
    placed, x, line = [], 0.0, 0
    for colour, text in entries:
        if x and x + _entry_width(text) > widest:
            x, line = 0.0, line + 1
        placed.append((colour, text, x, line))
        x += _entry_width(text) + LEGEND_FONT
    return placed


def _entry_width(text: str) -> float:
    return 2 * RING + 4 + text_width(text, LEGEND_FONT)


def _dot(group: ET.Element, colour: str, *, recovered: bool) -> None:
    if recovered:
        add(group, "circle", r=RING, fill=PAPER, stroke=RECOVERED, stroke_width=2)
    add(group, "circle", r=DOT, fill=FAINT if colour == RECOVERED else colour)


def add(parent: ET.Element, tag: str, text: str | None = None, /, **attributes: Any) -> ET.Element:
    """Add an element and return it; names of attributes have `_` for `-`."""
    element = ET.SubElement(parent, tag)
    element.text = text
    for name, value in attributes.items():
        element.set(name.replace("_", "-"), _number(value) if isinstance(value, float) else str(value))
    return element


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
