"""`drain`: waits until workers have finished the work that is due, before an upgrade, a move or a removal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ..inspection import Inspection
from ..model.printable import counted
from . import names
from .command import Failed, answering
from .looks import looks
from .output import Output, moment
from .times import Seconds

RESTING = {
    "suspended": ("suspended job", "suspended jobs"),
    "timers": ("timer", "timers"),
    "results": ("result not sent yet", "results not sent yet"),
}


@click.command()
@click.option("--queue", metavar="NAME", help="Wait for this queue only.")
@click.option(
    "--horizon", metavar="DURATION", type=Seconds(),
    help="Wait for runs that are due within this time; by default sidejob_timer_horizon. Later runs are only counted.",
)  # fmt: skip
@click.option("--timeout", metavar="DURATION", type=Seconds(), help="Wait no longer than this.")
@answering
def drain(sidejob: Any, output: Output, queue: str | None, timeout: float | None, horizon: float | None) -> None:
    """Wait until no run is due or in progress. Leave workers running, and have clients make no new calls.

    Suspended jobs, timers and later runs (their eta or retry is beyond the horizon) are counted and left as they are.
    Ends with 0 when it is done, with 1 when the time is up, with 2 if nobody knows the queue.
    """
    inspection = Inspection(sidejob.runtime)
    if queue is not None and (said := names.unknown(sidejob, output, "queue", queue)):
        raise Failed(said, code=2)  # "nothing is left" would be misread as "all is done"
    horizon_s = sidejob.settings.timer_horizon if horizon is None else horizon
    left = _wait(partial(inspection.pending, queue, horizon_s=horizon_s), output, timeout)
    done = not left["queues"]
    output.answer({"done": done, **left}, _done(left) if done else f"The time is up. {_undone(left)}")
    sys.exit(0 if done else 1)


def _wait(pending: Callable[[], dict[str, Any]], output: Output, timeout: float | None) -> dict[str, Any]:
    """Wait until nothing is left or the time is up, report each change, and return what is left."""
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
