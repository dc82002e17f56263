"""`tree`: a job and all jobs below it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import click
from rich.text import Text
from rich.tree import Tree

from ..inspection import DEEPEST, Inspection, Node
from .command import answering, job_named
from .options import AtLeast, job_argument
from .output import Output, at_least, line, status


@click.command()
@job_argument
@click.option(
    "--depth", type=click.IntRange(0, DEEPEST), default=100, show_default=True, help="Show at most this many levels."
)
@click.option("--limit", type=AtLeast(1), default=1000, show_default=True, help="Show at most this many jobs.")
@answering
def tree(sidejob: Any, output: Output, job_id: str, depth: int, limit: int) -> None:
    """Show a job and all jobs below it. Reading and printing a thousand jobs takes a fifth of a second.

    Each level indents the lines by four columns. For a tree of a thousand levels, --json is shorter.
    """
    with output.progress("Reading the tree"):
        nodes = Inspection(sidejob.runtime).tree(job_named(sidejob, job_id), depth=depth, limit=limit)
    output.answer([asdict(node) for node in nodes], _grown(nodes))
    if _left_out(nodes):
        output.note("There are more jobs below these: raise --limit or --depth.")


def _grown(nodes: list[Node]) -> Tree:
    left_out = _left_out(nodes)
    endless = {node.id for node in nodes if node.more_children}
    trees: dict[int, Tree] = {}
    for node in nodes:
        shown = line((str(node.id), "bold"), f"  {_label(node)}  ", status(node.status))
        if node.progress is not None:
            shown += line((f"  {node.progress['shown']}", "bright_black"))
        # A parent comes before its children; the first node's own is not here.
        above = trees.get(node.parent) if node.parent is not None else None
        trees[node.id] = above.add(shown) if above is not None else Tree(shown)
    for job_id, count in left_out.items():
        has = len(trees[job_id].children)
        number = at_least(count, job_id in endless)
        trees[job_id].add(Text(f"… {number} more" if has else f"… {number} below", style="bright_black"))
    return trees[nodes[0].id]


def _label(node: Node) -> str:
    return node.task if node.child_name is None else f"{node.child_name}: {node.task}"


def _left_out(nodes: list[Node]) -> dict[int, int]:
    """Count the children of each job that are not shown."""
    shown = Counter(node.parent for node in nodes[1:])
    return {node.id: node.children - shown[node.id] for node in nodes if node.children > shown[node.id]}
