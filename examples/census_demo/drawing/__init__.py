"""The picture of a graph of jobs, as an SVG.

A few jobs are labelled boxes from left to right (`boxes`). More would be a strip that nobody can take in: they become
an indented list in columns, as of files in folders, in which most jobs without children are dots beside their parent's
name (`columns`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from .boxes import draw_boxes
from .columns import draw_columns
from .node import COLOURS, grow
from .picture import DOT, Picture

TALLEST = 40
"""Rows up to which jobs are boxes; without children each is one."""
MOST_BOXES = 150

__all__ = ["COLOURS", "DOT", "TALLEST", "draw_tree"]


def draw_tree(
    rows: Iterable[tuple[int, int | None, str, str]],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    recovered: Mapping[int, str] | None = None,
) -> int:
    """Draw jobs, given as (id, parent id, label, status), into an SVG file, and return how many they were.

    A job whose parent is not among the rows is a root; siblings keep the order of the rows. The title stands above,
    with the number of jobs. `recovered` has the jobs of which a run was lost, {id: that in words}: they are marked.
    Raises ValueError without any row, and OSError if the file cannot be written.
    """
    nodes = grow(rows, recovered or {})
    picture = Picture()
    if len(nodes) <= MOST_BOXES and sum(not node.children for node in nodes) <= TALLEST:
        draw_boxes(picture, nodes)
    else:
        draw_columns(picture, nodes)
    picture.frame(nodes, title)
    picture.save(path)
    return len(nodes)
