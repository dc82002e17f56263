"""Options and arguments that several commands have, with their types."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import click

from ..deadset import REASONS as DEATHS
from ..model.checks import MOST
from ..model.printable import moment_from, seconds_from, since_from
from ..model.status import Status
from ..operations.waiting import REASONS
from ..store.waiting import STATUSES

P = ParamSpec("P")
R = TypeVar("R")


class Read(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A text that `read` understands; for any other text it raises ValueError, which says what is wrong."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: Any, context: Any) -> Any:
        """Check it, and return what it stands for."""
        try:
            return self._read(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)


SECONDS = Read("duration", seconds_from)
"""A number of seconds, or a duration such as 90s, 5min, 2h, 3d or 1w."""
MOMENT = Read("time", moment_from)
"""A moment such as 2026-11-28 or 2026-11-28T10:30, in this machine's time zone unless it names another."""
SINCE = Read("time or duration", since_from)
"""A moment, or how long ago it was: 2026-11-28T10:30, 2h."""


class AtLeast(click.IntRange):
    """A number with a lower bound. It also fits into Postgres' bigint, which the help need not mention."""

    def __init__(self, least: int) -> None:
        super().__init__(least, MOST)

    def _describe_range(self) -> str:
        return f"x>={self.min}"


job_argument = click.argument("job_id", metavar="ID_OR_ALIAS")
queue_option = click.option("--queue", metavar="NAME", help="Only entries of this queue.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask first.")
limit_option = click.option("--limit", type=AtLeast(1), default=100, show_default=True, help="Show at most this many.")


class TaskStatus(click.Choice):  # type: ignore[type-arg]  # generic in newer versions only
    """A status of a durable task that waits or runs."""

    def convert(self, value: Any, param: Any, context: Any) -> Any:
        """Check the status; for a status of ended tasks, say where ended tasks are shown."""
        if value in (*DEATHS, "completed"):
            where = "tasks --finished" if value == "completed" else f"dead list --reason {value}"
            self.fail(f"A task that is {value} waits and runs no more: see `{where}`.", param, context)
        return super().convert(value, param, context)


def together(*options: Callable[[Any], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return the decorator that gives a command all of these options, in this order."""
    return lambda function: functools.reduce(lambda made, option: option(made), reversed(options), function)


JOB_FILTERS: Sequence[click.Parameter] = (
    click.Option(
        ["--status"],
        type=click.Choice([str(one) for one in Status]),
        multiple=True,
        help="Only jobs with this status; may be repeated.",
    ),
    click.Option(["--task"], metavar="NAME", help="Only jobs of this task."),
    click.Option(["--queue"], metavar="NAME", help="Only jobs of this queue."),
    click.Option(["--created-by"], metavar="WHO", help="Only jobs that this one made, such as job:7."),
    click.Option(["--unique"], metavar="KEY", help="Only the open job that has this unique key."),
    click.Option(["--tag"], metavar="TAG", help="Only jobs that have this tag."),
    click.Option(["--batch"], metavar="NAME", help="Only jobs of this batch."),
    click.Option(
        ["--since"],
        metavar="TIME",
        type=SINCE,
        help="Only jobs made since this time (2026-11-28T10:30, in local time), or no longer ago than this (2h).",
    ),
    click.Option(
        ["--older-than"],
        metavar="DURATION",
        type=SECONDS,
        help="Only jobs that are older than this: seconds, or 5min, 2h, 3d.",
    ),
    click.Option(["--waiting-for"], type=click.Choice(REASONS), help="Only jobs that do not run now for this reason."),
    click.Option(["--child-of", "parent"], metavar="ID_OR_ALIAS", help="Only the children of this job."),
)
"""The options that choose jobs, named like the parameters of `sidejob.jobs`."""

task_filters = together(
    click.option("--task", metavar="NAME", help="Only durable tasks of this name."),
    click.option("--queue", metavar="NAME", help="Only durable tasks of this queue."),
    click.option(
        "--status",
        "statuses",
        type=TaskStatus(STATUSES),
        multiple=True,
        help="Only durable tasks with this status; may be repeated.",
    ),
)
"""Gives a command the options that choose waiting or running durable tasks, as in `TaskViews.tasks`."""


def check_one_way(*ways: bool, say: str) -> None:
    """Raise a usage error with the text `say` unless exactly one of these ways to choose is used."""
    if ways.count(True) != 1:
        raise click.UsageError(say)


FORMS = {list: "a JSON list, such as '[1, \"a\"]'", dict: "a JSON object, such as '{\"page\": 7}'"}
"""The forms of JSON arguments, for errors."""
MOST_SHOWN = 100
"""The most characters of a text that an error shows."""


def parsed(text: str, kind: type[list[Any]] | type[dict[str, Any]] | None = None) -> Any:
    """Return the value that a JSON text stands for, with `kind` a list or a dict; ValueError says what is wrong."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        given = repr(text) if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]!r}…"
        quoted, hint = json.dumps(text), ""
        if text.isidentifier() and len(text) <= MOST_SHOWN:
            # The shell has removed the outer quotes: "a" on the command line arrives as a.
            hint = f" A text has double quotes: {quoted}. In a shell, type '{quoted}'."
        raise ValueError(f"{given} is no JSON value: {error}.{hint}") from error
    if kind is not None and not isinstance(found, kind):
        raise ValueError(f"{text!r} is not {FORMS[kind]}.")
    return found


JSON_LIST = Read("json", partial(parsed, kind=list))
JSON_OBJECT = Read("json", partial(parsed, kind=dict))
