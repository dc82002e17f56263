"""`stats`: the store at a glance."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..inspection import Inspection
from ..model.status import Status
from .command import as_json, with_sidejob
from .output import Output, status, table


@click.command()
@as_json
@with_sidejob
def stats(sidejob: Any, output: Output, as_json: bool) -> None:
    """Count jobs by status, messages by queue, workers and the dead set; reads all jobs."""
    found = Inspection(sidejob.runtime).stats()
    if as_json:
        output.json(found)
    else:
        output.show(*_tables(found))


def _tables(found: dict[str, Any]) -> list[RenderableType]:
    counts = found["jobs"]
    shown: list[RenderableType] = [
        table("Jobs", "Status", rows=[(counts[name], status(name)) for name in Status if name in counts])
        if counts
        else Text("There are no jobs.")
    ]
    if found["queues"]:
        rows = [
            (name, queue["messages"], queue["running"], queue["unpublished"], _duration(queue["oldest_due_s"]))
            for name, queue in found["queues"].items()
        ]
        shown.append(table("Queue", "Messages", "Running", "Not published", "Waiting for", rows=rows))
    if found["workers"]:
        lives = [(worker["id"], worker["ident"], _life(worker)) for worker in found["workers"]]
        shown.append(table("Worker", "Process", "", rows=lives))
    else:
        shown.append(Text("No worker is known."))
    dead = found["dead"]
    shown.append(Text(f"Dead set: {dead}", style="bold red" if dead else ""))
    return shown


def _life(worker: dict[str, Any]) -> Text:
    if not worker["alive"]:
        return Text("dead", style="red")
    return Text("suspected", style="yellow") if worker["suspected"] else Text("alive", style="green")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"
