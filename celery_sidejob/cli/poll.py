"""`poll`: sweeps once, by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from .command import as_json, load_modules, with_sidejob
from .output import Output, table

MEANINGS = {
    "published": "messages given to the broker",
    "missing": "of them published before and not heard of since",
    "timers": "jobs asked by timers that were due",
    "rescued": "lost runs rescued",
    "declared_dead": "workers declared dead",
    "suspected": "workers suspected of being dead: poll again in a while, one that stays silent is declared dead",
    "results": "results brought to the result backend",
    "unpublished": "messages the broker did not take; they are tried again",
    "tasks_taken": "ordinary durable tasks taken from workers that died",
    "tasks_buried": "ordinary durable tasks that were lost, revoked or expired, and go to the dead set",
    "broker_emptied": "the broker had been emptied",
}


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
        rows = [
            ("yes" if found is True else found, MEANINGS.get(what, what)) for what, found in report.items() if found
        ]
        output.show(table("", "", rows=rows))
    else:
        output.show(Text("All is well: nothing was due, missing or lost."))
