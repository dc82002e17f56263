"""Names of tasks and queues that a person may have misspelt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

from ..inspection.queues import QueueViews
from ..inspection.tasks import TaskViews
from ..model.checks import did_you_mean
from .command import load_modules
from .output import Output

NOBODY = {
    "task": "no job and no waiting task has it, no worker has registered it, and the app has none of that name",
    "queue": "nothing is in it, no worker serves it, and the app has none of that name",
}


def unknown(sidejob: Any, output: Output, kind: Literal["task", "queue"], name: str) -> str | None:
    """Say that no worker or row has this name, and which similar name exists; None if the name is known."""
    load_modules(sidejob)
    queues = QueueViews(sidejob.runtime)
    known = {*_of_app(sidejob.app, kind)}
    if name in known or name in (known := known | queues.names(kind)):
        return None
    with output.progress(f"Looking for the {kind} {name} in all jobs"):
        if TaskViews(sidejob.runtime).knows_task(name) if kind == "task" else queues.knows_queue(name):
            return None
    return f"Nobody knows a {kind} {name!r}: {NOBODY[kind]}.{did_you_mean(name, known)}"


def hint(sidejob: Any, output: Output, **given: str | None) -> None:
    """After a search without results, say which `task` or `queue` is unknown."""
    for kind in ("task", "queue"):
        name = given.get(kind)
        if name is not None and (said := unknown(sidejob, output, kind, name)):
            output.note(said)


def _of_app(app: Any, kind: str) -> Iterator[str]:
    if kind == "task":
        yield from app.tasks
        return
    yield from app.amqp.queues
    for task in app.tasks.values():
        queue = getattr(task, "queue", None)
        with suppress(Exception):  # a router of the app's own may need the arguments
            queue = queue or app.amqp.router.route({}, task.name, task_type=task).get("queue")
        if queue is not None:
            yield str(getattr(queue, "name", queue))
