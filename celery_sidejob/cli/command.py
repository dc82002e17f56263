"""What every command does: find the app's SideJob, and show our errors as one line with exit code 1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import click

from ..model.errors import SideJobError
from .output import Output, one_line

P = ParamSpec("P")
R = TypeVar("R")

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead, for programs.")
job_argument = click.argument("job_id", metavar="ID_OR_ALIAS")
largest_id = 2**63 - 1


class Failed(click.ClickException):
    """Ends a command with one line, ``Error: …``, and exit code 1 or the one given."""

    def __init__(self, message: object, *, code: int = 1) -> None:
        super().__init__(one_line(with_app(str(message))))
        self.exit_code = code  # type: ignore[misc]  # click reads it from the instance


def with_sidejob(function: Callable[Concatenate[Any, Output, P], R]) -> Callable[P, R]:
    """Call a command with the app's SideJob and where to print to, before its own parameters."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        celery = click.get_current_context().obj
        try:
            return function(_sidejob_of(celery.app), Output(coloured=not celery.no_color), *args, **kwargs)
        except SideJobError as error:
            raise Failed(error) from error

    return call


def load_modules(sidejob: Any) -> None:
    """Import the app's modules, as its workers do: receivers of our signals are there, and what continuations call."""
    sidejob.app.loader.import_default_modules()


def with_app(text: str) -> str:
    """Put the app as it was named with -A in the place of ``<app>``, so that the commands in a text can be copied."""
    context = click.get_current_context(silent=True)
    name = context.find_root().params.get("app") if context is not None else None
    return text.replace("<app>", name) if isinstance(name, str) else text


def _sidejob_of(app: Any) -> Any:
    sidejob = getattr(app, "sidejob", None)
    if sidejob is None:
        raise Failed(
            f"The app {app.main or 'default'!r} has no SideJob. Name your app with `celery -A <module> sidejob …`, and "
            "in that module add: from celery_sidejob import SideJob; sidejob = SideJob(app)"
        )
    return sidejob
