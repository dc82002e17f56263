"""`poll`: sweeps once, by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from ..services.sweep.duties import COUNTS
from .command import as_json, load_modules, with_sidejob
from .output import Output, table


@click.command()
@as_json
@with_sidejob
def poll(sidejob: Any, output: Output, as_json: bool) -> None:
    """Sweep once: publish what is due or missing, apply timers, rescue lost runs. Workers do this by themselves."""
    load_modules(sidejob)
    report = asdict(sidejob.poll())
    if as_json:
        output.json(report)
    elif any(report.values()):
        rows = [("yes" if found is True else found, _words(what)) for what, found in report.items() if found]
        output.show(table("", "", rows=rows))
    else:
        output.show(Text("All is well: nothing was due, missing or lost."))


def _words(what: str) -> str:
    meaning = COUNTS[what].meaning
    return meaning[0].lower() + meaning[1:].rstrip(".")
