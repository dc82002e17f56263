"""`batches`: lists the batches, and lets a person see one, close it or delete it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ..jobs.batch import Batch
from .command import answering
from .options import yes_option
from .output import Output, table_if_any
from .selection import confirm

name_argument = click.argument("name")
COLUMNS = ("Batch", "", "Members", "Completed", "Failed", "Terminated", "Open")


@click.group()
def batches() -> None:
    """List batches, and show one, close it or delete it."""


@batches.command("list")
@answering
def list_batches(sidejob: Any, output: Output) -> None:
    """Show all batches, oldest first, and how their members have ended; reads all members."""
    _show(output, sidejob.batches(), lambda found: found)


@batches.command()
@name_argument
@answering
def show(sidejob: Any, output: Output, name: str) -> None:
    """Show how the members of a batch have ended."""
    _show(output, [sidejob.get_batch(name)], lambda found: found[0])


@batches.command()
@name_argument
@answering
def close(sidejob: Any, output: Output, name: str) -> None:
    """Close a batch that somebody left open: it takes nothing more, and ends when all its members have."""
    about = _about(sidejob.get_batch(name).close())
    output.answer(about, f"Batch {name} is closed. Open members: {about['counts']['open']}.")


@batches.command()
@name_argument
@yes_option
@answering
def delete(sidejob: Any, output: Output, name: str, yes: bool) -> None:
    """Delete a batch, after a question: nothing follows it, and its members go on."""
    batch = sidejob.get_batch(name)
    confirm(f"Delete batch {name} ({batch.counts.open} open), so that nothing follows it?", yes=yes)
    batch.delete()
    output.answer({"name": name, "deleted": True}, f"Batch {name} is deleted.")


def _show(output: Output, found: list[Batch], document: Any) -> None:
    shown = [_about(batch) for batch in found]
    rows = [(each["name"], each["state"], *each["counts"].values()) for each in shown]
    output.answer(document(shown), table_if_any(*COLUMNS, rows=rows) or "There is no batch.")


def _about(batch: Batch) -> dict[str, Any]:
    counts, ended_at = batch.counts, batch.ended_at
    state = "ended" if ended_at is not None else "closed" if batch.closed else "takes members"
    return {"name": batch.name, "state": state, "ended_at": ended_at, "counts": {**asdict(counts), "open": counts.open}}
