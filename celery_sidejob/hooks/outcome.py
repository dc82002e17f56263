"""The outcome of a run in the process that asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """The value of a run's body, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None
    rests: bool = False
    """Whether it has neither: it is suspended, will be tried again, or must not run."""
