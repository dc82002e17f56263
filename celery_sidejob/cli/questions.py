"""Questions that a command asks before it changes much."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import click

from ..model.printable import counted, printable
from .command import Failed, with_app


def confirm_all(verb: str, counts: Mapping[str, int], nouns: tuple[str, str], *, yes: bool) -> None:
    """Ask whether to `verb` all that were counted by status, unless there are none; `nouns` name one and many."""
    total = sum(counts.values())
    if total:
        kinds = ", ".join(f"{number:,} {status}" for status, number in sorted(counts.items()))
        confirm(f"{verb} {counted(total, *nouns)} ({kinds})?", yes=yes)


def confirm(question: str, *, yes: bool) -> None:
    """Ask whether to go on, unless `yes`; fail, before anything is changed, if not or if nobody can answer."""
    if yes:
        return
    if not can_ask():
        raise Failed(f"Nothing was changed. {question} There is no terminal to ask on: say --yes.")
    if not click.confirm(printable(with_app(question)), err=True):
        raise Failed("Nothing was changed.")


def can_ask() -> bool:
    """Tell whether somebody is there who can answer a question."""
    return sys.stdin is not None and sys.stdin.isatty()  # None: it is closed
