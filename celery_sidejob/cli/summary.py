"""How many jobs, tasks or entries a command acts on: the question before it, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..model.errors import SideJobError
from ..model.plural import counted
from .command import confirm
from .output import Output


def confirm_all(verb: str, counts: Mapping[str, int], nouns: tuple[str, str], *, yes: bool) -> None:
    """Ask whether to `verb` all that were counted by status, unless there are none; `nouns` name one and many."""
    total = sum(counts.values())
    if total:
        kinds = ", ".join(f"{number:,} {status}" for status, number in sorted(counts.items()))
        confirm(f"{verb} {counted(total, *nouns)} ({kinds})?", yes=yes)


class Summary:
    """How many something was done with, and how many were skipped, by the reason."""

    def __init__(self) -> None:
        self.done = 0
        self.skipped: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def skip(self, reason: str, number: int = 1) -> None:
        """Count what was skipped for a reason."""
        if number:
            self.skipped[reason] += number

    def refuse(self, error: SideJobError) -> None:
        """Count an error; the first one of each kind is told in full."""
        self.skip(type(error).__name__)
        self._examples.setdefault(type(error).__name__, str(error))

    @property
    def skips(self) -> str:
        """A sentence on what was skipped; empty if nothing was."""
        if not self.skipped:
            return ""
        return f" Skipped: {', '.join(f'{number:,} ({reason})' for reason, number in self.skipped.most_common())}."

    def note_errors(self, output: Output) -> None:
        """Note one error of each kind in full."""
        for kind, example in self._examples.items():
            output.note(f"{kind}, for example: {example}")
