"""absurd as a side: `python -m benchmarks.steps.absurd_side install|client|worker URL`."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from absurd_sdk import Absurd, TaskContext

from benchmarks.note import note
from benchmarks.steps.body import CONCURRENCY, QUEUE, nothing, obey

resting: list[str] = []


def main(verb: str, url: str) -> None:
    """Make the tables, send what each line of the input says, or work until killed."""
    if verb == "install":
        for command in (["init"], ["create-queue", QUEUE]):
            subprocess.run([Path(sys.executable).parent / "absurdctl", command[0], "-d", url, *command[1:]], check=True)
        return
    app = Absurd(url, queue_name=QUEUE)

    @app.register_task(name="body")
    def body(params: Any, context: TaskContext) -> None:
        """Do so many steps, rest if told so, and note the end."""
        for _ in range(params["steps"]):
            context.step("step", nothing)
        if params["event"]:
            note()
            context.await_event(params["event"])
        note()

    if verb == "worker":
        app.start_worker(concurrency=CONCURRENCY)
    else:
        obey(lambda count, steps, rests: make(app, count, steps, rests=rests), lambda: wake(app))


def make(app: Absurd, count: int, steps: int, *, rests: bool) -> None:
    """Spawn tasks."""
    for _ in range(count):
        event = str(uuid.uuid4()) if rests else None
        app.spawn("body", {"steps": steps, "event": event})
        if event:
            resting.append(event)


def wake(app: Absurd) -> None:
    """Emit what each task waits for."""
    for event in resting:
        app.emit_event(event, 1)
    resting.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
