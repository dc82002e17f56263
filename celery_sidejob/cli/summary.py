"""What became of the jobs, tasks or entries that a command acts on."""

from __future__ import annotations

from collections import Counter

from ..model.errors import SideJobError
from .output import Output


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
