"""Gives the package's commands to an app in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_sidejob.cli import sidejob as group

APART: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
"""Before click 8.2 the two streams are one unless it is told."""


@dataclass
class Said:
    """What a command wrote, and the code it ended with."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on its standard output."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """The lines on its standard output, with their blanks collapsed and without empty ones and rules."""
        lines = [" ".join(line.split()) for line in self.out.splitlines()]
        return [line for line in lines if line.strip("─")]


Command = Callable[..., Said]


def ask(app: Celery, *words: object, no_color: bool = True, typed: str | None = None) -> Said:
    """Give one command to an app in this process; `typed` is its standard input."""
    context = CLIContext(app=app, no_color=no_color, workdir=None)
    done = CliRunner(**APART).invoke(
        group, [str(word) for word in words], obj=context, input=typed, catch_exceptions=False
    )
    return Said(done.exit_code, done.stdout, done.stderr)
