"""`poll`, `doctor` and `drain`: sweep once, find problems, and wait until nothing is due."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..examination import examine
from ..inspection.queues import QueueViews
from ..model.finding import Finding, Level
from ..model.printable import counted
from ..services.sweep.sweeper import COUNTS
from .command import Failed, answering, load_modules, unknown_name, with_app
from .looks import looks
from .options import SECONDS
from .output import Output, moment, printable, table, table_if_any


@click.command()
@answering
def poll(sidejob: Any, output: Output) -> None:
    """Sweep once: publish what is due or missing, apply timers, rescue lost runs. Workers do this by themselves."""
    load_modules(sidejob)
    report = asdict(sidejob.poll())
    rows = [
        (COUNTS[what].meaning.rstrip("."), "yes" if found is True else found) for what, found in report.items() if found
    ]
    output.answer(report, table_if_any("", "", rows=rows) or "All is well: nothing was due, missing or lost.")


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
        found = list(examine(sidejob, thorough=thorough))
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


RESTING = {
    "suspended": ("suspended job", "suspended jobs"),
    "timers": ("timer", "timers"),
    "results": ("result not sent yet", "results not sent yet"),
}


@click.command()
@click.option("--queue", metavar="NAME", help="Wait for this queue only.")
@click.option(
    "--horizon",
    metavar="DURATION",
    type=SECONDS,
    help="Wait for runs that are due within this time; by default sidejob_timer_horizon. Later runs are only counted.",
)
@click.option("--timeout", metavar="DURATION", type=SECONDS, help="Wait no longer than this.")
@answering
def drain(sidejob: Any, output: Output, queue: str | None, timeout: float | None, horizon: float | None) -> None:
    """Wait until no run is due or in progress. Leave workers running, and have clients make no new calls.

    Suspended jobs, timers and later runs (their eta or retry is beyond the horizon) are counted and left as they are.
    Ends with 0 when it is done, with 1 when the time is up, with 2 if nobody knows the queue.
    """
    views = QueueViews(sidejob.runtime)
    if queue is not None and (said := unknown_name(sidejob, output, "queue", queue)):
        raise Failed(said, code=2)  # "nothing is left" would be misread as "all is done"
    horizon_s = sidejob.settings.timer_horizon if horizon is None else horizon
    left = _wait(partial(views.pending, queue, horizon_s=horizon_s), output, timeout)
    done = not left["queues"]
    output.answer({"done": done, **left}, _done(left) if done else f"The time is up. {_undone(left)}")
    sys.exit(0 if done else 1)


def _wait(pending: Callable[[], dict[str, Any]], output: Output, timeout: float | None) -> dict[str, Any]:
    """Wait until no work remains or the time is up, report each change, and return the remaining work."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    said = ""
    for left in looks(pending, output, deadline=deadline):
        if not left["queues"] or time.monotonic() >= deadline:
            break
        if (now := _undone(left)) != said:
            output.note(said := now)
    return left


def _undone(left: dict[str, Any]) -> str:
    queues = [
        f"{name} ({counts['queued']} queued, {counts['running']} running)" for name, counts in left["queues"].items()
    ]
    said = f"Not finished: {', '.join(queues)}."
    if left["unserved"]:
        said += f" No live worker serves {', '.join(left['unserved'])}: start one."
    return said


def _done(left: dict[str, Any]) -> str:
    rest = [counted(left[what], one, many) for what, (one, many) in RESTING.items() if left[what]]
    if left["parked"]:
        parked = counted(left["parked"], "parked run", "parked runs")
        rest.insert(0, f"{parked} (no worker of the queue knows the task)")
    if left["later"]:
        later = counted(left["later"], "run for later", "runs for later")
        rest.insert(0, f"{later} (the first at {moment(left['later_from'])})")
    return f"No run is due or in progress. Left: {', '.join(rest) or 'nothing'}."
