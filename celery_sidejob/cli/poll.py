"""`poll`: sweeps once, by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from ..services.sweep.duties import COUNTS
from .command import answering, load_modules
from .output import Output, table_if_any


@click.command()
@answering
def poll(sidejob: Any, output: Output) -> None:
    """Sweep once: publish what is due or missing, apply timers, rescue lost runs. Workers do this by themselves."""
    load_modules(sidejob)
    report = asdict(sidejob.poll())
    rows = [("yes" if found is True else found, _words(what)) for what, found in report.items() if found]
    output.answer(report, table_if_any("", "", rows=rows) or Text("All is well: nothing was due, missing or lost."))


def _words(what: str) -> str:
    meaning = COUNTS[what].meaning
    return meaning[0].lower() + meaning[1:].rstrip(".")
