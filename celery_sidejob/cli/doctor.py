"""`doctor`: what is wrong, what that means, and what to do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..diagnosis.diagnosis import Diagnosis
from ..hooks import task_check
from ..hooks.broker import announcing_client, broker_check
from ..model.finding import Finding, Level
from .command import answering, load_modules, with_app
from .output import Output, printable, table

COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}
CODES = {Level.OK: 0, Level.WARNING: 1, Level.ERROR: 2}


@click.command()
@click.option("--thorough", is_flag=True, help="Also check every job for contradicting rows; reads all jobs.")
@answering
def doctor(sidejob: Any, output: Output, thorough: bool) -> None:
    """Find problems: schema, rights, queues, workers, broker, vacuum, clocks.

    Ends with 0 if all is well, 1 if there are warnings, 2 if there are errors. Takes up to half a second where there
    are millions of rows; with --thorough it reads all jobs, a million in some seconds.
    """
    load_modules(sidejob)
    with output.progress("Looking at every job" if thorough else "Looking"):
        found = [
            *Diagnosis(sidejob.runtime, sidejob.owner).findings(thorough=thorough),
            *chain.from_iterable(
                Diagnosis(there, sidejob.owner).of_further_store() for there in sidejob.runtime.in_each_store()[1:]
            ),
            *broker_check.findings(sidejob.app),
            *announcing_client.findings(sidejob.app),
            *task_check.findings(sidejob.app),
        ]
    found = [replace(one, found=with_app(one.found), remedy=with_app(one.remedy)) for one in found]
    worst = max((finding.level for finding in found), key=CODES.__getitem__)
    documents = [{key: value or None for key, value in asdict(finding).items()} for finding in found]
    output.answer({"level": worst, "findings": documents}, *_shown(found))
    sys.exit(CODES[worst])


def _shown(found: Sequence[Finding]) -> list[RenderableType]:
    rows = [(finding.check, Text(str(finding.level), COLOURS[finding.level]), finding.found) for finding in found]
    shown: list[RenderableType] = [table("Check", "", "Found", rows=rows)]
    for level in (Level.ERROR, Level.WARNING):
        for finding in found:
            if finding.level == level:
                head = (f"{level}: {finding.check}. ", COLOURS[level])
                rest = "\n  ".join(map(printable, (finding.found, finding.meaning, f"→ {finding.remedy}")))
                shown.append(Text.assemble(head, rest))
    count = Counter(finding.level for finding in found)
    if count[Level.OK] == len(found):
        shown.append(Text("All is well.", COLOURS[Level.OK]))
    else:
        shown.append(Text(f"Errors: {count[Level.ERROR]}. Warnings: {count[Level.WARNING]}."))
    return shown
