"""The common part of all commands: find the app's SideJob, and show an error as one line with exit code 1.

`with_sidejob` gives a command its `SideJob` and its `Output`; `answering` adds the option --json, which `Output.answer`
obeys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import click

from ..inspection.queues import QueueViews
from ..inspection.tasks import TaskViews
from ..jobs.job import Job
from ..model.checks import did_you_mean, is_keepable
from ..model.errors import SideJobError
from .options import as_json
from .output import Output, one_line, printable

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130
"""The exit code of a command that was ended by Ctrl-C, as in shells."""
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


def with_output(function: Callable[Concatenate[Any, Output, P], R]) -> Callable[P, R]:
    """Call a command with the Celery app and its output, before its own parameters; the output knows about --json."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        celery = click.get_current_context().obj
        _check_texts(kwargs)
        output = Output(coloured=not celery.no_color, for_program=bool(kwargs.pop("as_json", False)))
        return function(celery.app, output, *args, **kwargs)

    return call


def with_sidejob(function: Callable[Concatenate[Any, Output, P], R]) -> Callable[P, R]:
    """Call a command with the app's SideJob and its output, before its own parameters."""

    @functools.wraps(function)
    def call(app: Any, output: Output, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            sidejob = _sidejob_of(app)
            with sidejob.runtime.connections.talking(within_s=PATIENCE_S):
                return function(sidejob, output, *args, **kwargs)
        except SideJobError as error:
            raise Failed(error) from error

    return with_output(call)


def answering(function: Callable[Concatenate[Any, Output, P], R]) -> Callable[P, R]:
    """Do what `with_sidejob` does, and give the command the option --json, which `Output.answer` obeys."""
    return as_json(with_sidejob(function))


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


def _check_texts(given: Mapping[str, object]) -> None:
    """Refuse bytes that are not text in the terminal's encoding: Python passes them on, and the store refuses them."""
    for value in given.values():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not is_keepable(text):
                raise click.UsageError(f"'{printable(text)}' is not encoded as your terminal says: it is no text.")


def _sidejob_of(app: Any) -> Any:
    sidejob = getattr(app, "sidejob", None)
    if sidejob is None:
        raise Failed(
            f"The app {app.main or 'default'!r} has no SideJob. Name your app with `celery -A <module> sidejob …`, and "
            "in that module add: from celery_sidejob import SideJob; sidejob = SideJob(app). The commands below "
            "`transport` work without one."
        )
    return sidejob


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
