"""`poll`: sweeps once, by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ..services.sweep.duties import COUNTS
from .command import answering, load_modules
from .output import Output, table_if_any


@click.command()
@answering
def poll(sidejob: Any, output: Output) -> None:
    """Sweep once: publish what is due or missing, apply timers, rescue lost runs. Workers do this by themselves."""
    load_modules(sidejob)
    report = asdict(sidejob.poll())
    rows = [
        (COUNTS[what].meaning.rstrip("."), "yes" if found is True else found)
        for what, found in report.items() if found
    ]  # fmt: skip
    output.answer(report, table_if_any("", "", rows=rows) or "All is well: nothing was due, missing or lost.")
