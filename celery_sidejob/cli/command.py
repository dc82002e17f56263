"""The common part of all commands: find the app's SideJob, show an error as one line with exit code 1, and follow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

import click

from ..inspection.queues import QueueViews
from ..inspection.tasks import TaskViews
from ..jobs.job import Job
from ..model.checks import did_you_mean, is_keepable
from ..model.errors import SideJobError, StoreUnavailableError
from .output import Output, one_line, printable

T = TypeVar("T")

INTERRUPTED = 130
"""The exit code of a command that was ended by Ctrl-C, as in shells."""
JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document instead, for programs.")
NAMED = 10
"""The most names that are suggested if none matches."""
PATIENCE_S = 60.0
"""How long a command waits for one transaction: for a locked row, or for a store that is silent."""
UNKNOWN = {
    "task": "no job and no waiting task has it, no worker has registered it, and the app has none of that name",
    "queue": "nothing is in it, no worker serves it, and the app has none of that name",
}


class Failed(click.ClickException):
    """Ends a command with one line, ``Error: …``, and exit code 1 or the one given."""

    def __init__(self, message: object, *, code: int = 1) -> None:
        super().__init__(one_line(with_app(str(message))))
        self.exit_code = code  # type: ignore[misc]  # click reads it from the instance


class AppCommand(click.Command):
    """A command that is called with the Celery app and its `Output`, before its own parameters.

    It has the option --json, which `Output.answer` obeys.
    """

    def __init__(self, *args: Any, has_json: bool = True, **rest: Any) -> None:
        super().__init__(*args, **rest)
        if has_json:
            self.params.append(JSON)

    def invoke(self, ctx: click.Context) -> Any:
        """Do the command; click shows the usage after an error in here."""
        return ctx.invoke(lambda: self.call(ctx.obj.app, output_of(ctx), ctx.params))

    def call(self, app: Any, output: Output, given: dict[str, Any]) -> Any:
        """Call the function of the command."""
        assert self.callback is not None
        return self.callback(app, output, **given)


class Command(AppCommand):
    """A command that is called with the app's SideJob and its `Output`, before its own parameters."""

    def call(self, app: Any, output: Output, given: dict[str, Any]) -> Any:
        """Call the function of the command."""
        with sidejob_of(app) as sidejob:
            return super().call(sidejob, output, given)


class Group(click.Group):
    """A group of commands with SideJob, and of such groups."""

    command_class = Command
    group_class = type


@click.group("sidejob", cls=Group)
def commands() -> None:
    """Inspect durable jobs and their store, and act on them."""


def output_of(context: click.Context) -> Output:
    """Return the output of a command, which knows about --json.

    Refuses bytes that are not text in the terminal's encoding: Python passes them on, and the store refuses them.
    """
    for value in context.params.values():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not is_keepable(text):
                raise click.UsageError(f"'{printable(text)}' is not encoded as your terminal says: it is no text.")
    return Output(coloured=not context.obj.no_color, for_program=bool(context.params.pop("as_json", False)))


@contextmanager
def sidejob_of(app: Any) -> Iterator[Any]:
    """Give the SideJob of an app to a block; an error of the package there ends the command with one line."""
    sidejob = getattr(app, "sidejob", None)
    if sidejob is None:
        raise Failed(
            f"The app {app.main or 'default'!r} has no SideJob. Name your app with `celery -A <module> sidejob …`, and "
            "in that module add: from celery_sidejob import SideJob; sidejob = SideJob(app). The commands below "
            "`transport` work without one."
        )
    try:
        with sidejob.runtime.connections.talking(within_s=PATIENCE_S):
            yield sidejob
    except SideJobError as error:
        raise Failed(error) from error


def job_named(sidejob: Any, which: str) -> Job:
    """Return the job of this id or alias; for a task id, fail and say what to do instead."""
    found: Job | None = sidejob.find(which)
    if found is not None:
        return found
    asked: Job | None = sidejob.for_task_id(which)
    if asked is not None:
        raise Failed(f"{which!r} is the task id of an asking of job {asked.id}: name the job.")
    if TaskViews(sidejob.runtime).task(which) is not None or sidejob.dead.for_task_id(which) is not None:
        raise Failed(
            f"{which!r} is a durable task, and no job: look at it with `celery -A <app> sidejob show`, end it with "
            "`revoke` while it waits, have it tried again from the dead set with `dead retry`."
        )
    job: Job = sidejob.get(which)  # raises
    return job


def load_modules(sidejob: Any) -> None:
    """Import the app's modules, as its workers do: for signal receivers, and for the tasks of continuations."""
    sidejob.app.loader.import_default_modules()


def nothing_matches(what: str, names: Sequence[str], given: str) -> str:
    """Say that nothing matches the given name, and suggest names that would."""
    if not names:
        return f"Nothing matches: {what} is empty."
    shown = ", ".join(map(repr, names[:NAMED]))
    return f"Nothing matches.{did_you_mean(given, names)} There are: {shown}{', …' if len(names) > NAMED else '.'}"


def with_app(text: str) -> str:
    """Replace ``<app>`` with the app as it was named with -A, so that the commands in a text can be copied."""
    context = click.get_current_context(silent=True)
    name = context.find_root().params.get("app") if context is not None else None
    return text.replace("<app>", name) if isinstance(name, str) else text


# -- names that a person may have misspelt -----------------------------------------------------------------------------


def unknown_name(sidejob: Any, output: Output, kind: Literal["task", "queue"], name: str) -> str | None:
    """Say that no worker or row has this name, and which similar name exists; None if the name is known."""
    load_modules(sidejob)
    queues = QueueViews(sidejob.runtime)
    known = {*_of_app(sidejob.app, kind)}
    if name in known or name in (known := known | queues.names(kind)):
        return None
    with output.progress(f"Looking for the {kind} {name} in all jobs"):
        if TaskViews(sidejob.runtime).knows_task(name) if kind == "task" else queues.knows_queue(name):
            return None
    return f"Nobody knows a {kind} {name!r}: {UNKNOWN[kind]}.{did_you_mean(name, known)}"


def hint_unknown(sidejob: Any, output: Output, **given: str | None) -> None:
    """After a search without results, say which `task` or `queue` is unknown."""
    for kind in ("task", "queue"):
        name = given.get(kind)
        if name is not None and (said := unknown_name(sidejob, output, kind, name)):
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


# -- commands that follow something in the store -----------------------------------------------------------------------

LOOK_S = 0.5
"""Seconds between two reads."""
HEARD_WITHIN_S = 5.0
"""How long a command waits for workers to end what they were told to end, in seconds."""


def looks(look: Callable[[], T], output: Output, *, deadline: float = math.inf) -> Iterator[T]:
    """Yield the result of each read, without an end; one of the reads is at the deadline.

    An error of the store is noted, and the store is read again; after the deadline the error is raised. The deadline
    is a time of `time.monotonic`.
    """
    while True:
        try:
            found = look()
        except StoreUnavailableError as error:
            if time.monotonic() >= deadline:
                raise
            output.note(str(error))
        else:
            yield found
        time.sleep(max(0.0, min(LOOK_S, deadline - time.monotonic())))


def wait_for_none(look: Callable[[], list[T]], output: Output) -> list[T]:
    """Read until the list is empty, for a while; return the last list."""
    deadline = time.monotonic() + HEARD_WITHIN_S
    for left in looks(look, output, deadline=deadline):
        if not left or time.monotonic() >= deadline:
            break
    return left
