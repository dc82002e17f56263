"""The findings of `doctor`: their severity, their meaning, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `meaning` and `remedy` are empty if all is well."""

    check: str
    level: Level
    found: str
    meaning: str = ""
    remedy: str = ""


def well(check: str, found: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, *, meaning: str, remedy: str) -> Finding:
    """Return a finding that somebody should look at, although work goes on."""
    return Finding(check, Level.WARNING, found, meaning, remedy)


def error(check: str, found: str, *, meaning: str, remedy: str) -> Finding:
    """Return a finding that keeps jobs from being run, or promises from being kept."""
    return Finding(check, Level.ERROR, found, meaning, remedy)


def graded(value: float, bounds: tuple[float, float]) -> Callable[..., Finding]:
    """Return the kind of finding for a value above the first bound: an error from the second bound on."""
    return error if value > bounds[1] else warning
