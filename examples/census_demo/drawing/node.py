"""A job as it is drawn."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from celery_sidejob.model.printable import is_visible
from celery_sidejob.model.status import Status

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
WIDTHS = {**dict.fromkeys("iljtfr.,:;|'!()[] ", 0.36), **dict.fromkeys("mwMW@%", 0.9)}
"""The width of narrow and wide letters, in parts of their height."""
LONGEST_LABEL = 40
"""Characters of a label in the drawing; the tooltip has all of them."""


@dataclass(slots=True, eq=False)
class Node:
    """One job and its place in the tree."""

    id: int
    label: str
    status: str
    recovered: str | None
    """How a lost run was recovered; None if no run was lost."""
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    level: int = 0

    @property
    def shown(self) -> str:
        """The label, cut to the room there is."""
        return shortened(self.label, LONGEST_LABEL)

    @property
    def colour(self) -> str:
        """The colour of its status."""
        return COLOURS.get(self.status, UNKNOWN)

    @property
    def tooltip(self) -> str:
        """The tooltip."""
        lost = f"; {self.recovered}" if self.recovered else ""
        return f"job {self.id}: {self.label} ({self.status}{lost})"


def grow(rows: Iterable[tuple[int, int | None, str, str]], recovered: Mapping[int, str]) -> list[Node]:
    """Return a node for each row, every parent before its children; ValueError without any."""
    given = {row[0]: row for row in rows}
    if not given:
        raise ValueError("There is nothing to draw: no rows were given.")
    nodes = {
        job_id: Node(job_id, printable(label), str(status), recovered.get(job_id))
        for job_id, _, label, status in given.values()
    }
    for job_id, parent_id, _, _ in given.values():
        parent = None if parent_id is None else nodes.get(parent_id)
        if parent is not None:
            nodes[job_id].parent = parent
            parent.children.append(nodes[job_id])
    ordered = []
    ahead = [node for node in reversed(nodes.values()) if node.parent is None]
    while ahead:  # a tree may be deeper than Python's stack
        node = ahead.pop()
        node.level = 0 if node.parent is None else node.parent.level + 1
        ordered.append(node)
        ahead += reversed(node.children)
    return ordered


def shortened(text: str, longest: int) -> str:
    """Return a text, cut at its end if it is too long."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def printable(text: str) -> str:
    """Replace line breaks, and characters that are not seen or that XML cannot hold."""
    return "".join(character if is_visible(character) else "\ufffd" for character in text)


def text_width(text: str, size: float) -> float:
    """Estimate the width of a text, rather too wide than too narrow: the viewer's font is not known."""
    return size * sum(
        1.0 if unicodedata.east_asian_width(character) in "WF" else WIDTHS.get(character, 0.62) for character in text
    )
