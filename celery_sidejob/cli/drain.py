"""`drain`: waits until workers have finished the work that is due, before an upgrade, a move or a removal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import click
from rich.text import Text

from ..inspection import Inspection
from ..model.checks import did_you_mean
from ..model.errors import StoreUnavailableError
from ..model.plural import counted
from .command import Failed, Seconds, answering, load_modules
from .output import Output, moment, printable

LOOK_S = 0.5
LONGEST_S = 1e9
RESTING = {
    "suspended": ("suspended job", "suspended jobs"),
    "timers": ("timer", "timers"),
    "results": ("result not sent yet", "results not sent yet"),
}


@click.command()
@click.option("--queue", metavar="NAME", help="Wait for this queue only.")
@click.option(
    "--horizon", metavar="SECONDS", type=Seconds(LONGEST_S),
    help="Wait for runs that are due within this time; by default sidejob_timer_horizon. Later runs are only counted.",
)  # fmt: skip
@click.option("--timeout", metavar="SECONDS", type=Seconds(LONGEST_S), help="Wait no longer than this.")
@answering
def drain(sidejob: Any, output: Output, queue: str | None, timeout: float | None, horizon: float | None) -> None:
    """Wait until no run is due or in progress. Leave workers running, and have clients make no new calls.

    Suspended jobs, timers and later runs (their eta or retry is beyond the horizon) are counted and left as they are.
    Ends with 0 when it is done, with 1 when the time is up, with 2 if nobody knows the queue.
    """
    inspection = Inspection(sidejob.runtime)
    if queue is not None:
        _check_queue(sidejob, output, inspection, queue)
    horizon_s = sidejob.settings.timer_horizon if horizon is None else horizon
    left = _wait(partial(inspection.pending, queue, horizon_s=horizon_s), output, timeout)
    done = not left["queues"]
    output.answer({"done": done, **left}, Text(_done(left) if done else f"The time is up. {_undone(left)}"))
    sys.exit(0 if done else 1)


def _wait(pending: Callable[[], dict[str, Any]], output: Output, timeout: float | None) -> dict[str, Any]:
    """Wait until nothing is left or the time is up, report each change, and return what is left."""
    deadline = time.monotonic() + (LONGEST_S if timeout is None else timeout)
    said = ""
    while True:
        try:
            left = pending()
        except StoreUnavailableError as error:
            if time.monotonic() >= deadline:
                raise
            output.note(str(error))
        else:
            if not left["queues"] or time.monotonic() >= deadline:
                return left
            now = _undone(left)
            if now != said:
                output.note(said := now)
        time.sleep(max(0.0, min(LOOK_S, deadline - time.monotonic())))


def _check_queue(sidejob: Any, output: Output, inspection: Inspection, queue: str) -> None:
    """Refuse an unknown queue: "nothing is left" would be misread as "all is done"."""
    load_modules(sidejob)
    known = {*sidejob.app.amqp.queues, *_queues_of_tasks(sidejob.app)}
    if queue in known:
        return
    with output.progress(f"Looking for the queue {printable(queue)} in all jobs"):
        is_known = inspection.knows_queue(queue)
    if not is_known:
        raise Failed(
            f"Nobody knows a queue {queue!r}: nothing is in it, no worker serves it, and the app has none of that name."
            f"{did_you_mean(queue, known)}", code=2,
        )  # fmt: skip


def _queues_of_tasks(app: Any) -> Iterator[str]:
    for task in app.tasks.values():
        queue = getattr(task, "queue", None)
        with suppress(Exception):  # a router of the app's own may need the arguments
            queue = queue or app.amqp.router.route({}, task.name, task_type=task).get("queue")
        if queue is not None:
            yield str(getattr(queue, "name", queue))


def _undone(left: dict[str, Any]) -> str:
    queues = [
        f"{printable(name)} ({counts['queued']} queued, {counts['running']} running)"
        for name, counts in left["queues"].items()
    ]
    said = f"Not finished: {', '.join(queues)}."
    if left["unserved"]:
        said += f" No live worker serves {', '.join(map(printable, left['unserved']))}: start one."
    return said


def _done(left: dict[str, Any]) -> str:
    rest = [counted(left[what], one, many) for what, (one, many) in RESTING.items() if left[what]]
    if left["parked"]:
        parked = counted(left["parked"], "parked job", "parked jobs")
        rest.insert(0, f"{parked} (no worker of the queue knows the task)")
    if left["later"]:
        later = counted(left["later"], "run for later", "runs for later")
        rest.insert(0, f"{later} (the first at {moment(left['later_from'])})")
    return f"No run is due or in progress. Left: {', '.join(rest) or 'nothing'}."
