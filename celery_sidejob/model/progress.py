"""How far a run has come, as its body reports it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .checks import is_text, shown
from .errors import InvalidValueError

LONGEST_NOTE = 1000


@dataclass(frozen=True, slots=True)
class Progress:
    """The last progress that a run reported: `done` of `total`, and a `note`; `told_at` by the store's clock."""

    done: float | None
    total: float | None
    note: str | None
    run_no: int
    told_at: datetime

    @property
    def fraction(self) -> float | None:
        """The share that is done, from 0.0 to 1.0; None unless both numbers are known."""
        if self.done is None or not self.total:
            return None
        return min(1.0, self.done / self.total)

    def __str__(self) -> str:
        numbers = "" if self.done is None else f"{self.done:g}" + ("" if self.total is None else f" of {self.total:g}")
        return ": ".join(filter(None, (numbers, self.note)))


def check(done: Any, total: Any, note: Any) -> None:
    """Raise InvalidValueError unless these values are a valid progress."""
    for name, value in (("done", done), ("total", total)):
        if value is not None and not (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        ):
            raise InvalidValueError(f"{name} of progress() is a number, at least 0, not {shown(value)}.")
    if note is not None and not (is_text(note) and len(note) <= LONGEST_NOTE):
        raise InvalidValueError(f"note of progress() is a text of up to {LONGEST_NOTE} characters, not {shown(note)}.")
