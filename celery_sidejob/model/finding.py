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
    """Return a finding that a person should look into, although work goes on."""
    return Finding(check, Level.WARNING, found, meaning, remedy)


def error(check: str, found: str, *, meaning: str, remedy: str) -> Finding:
    """Return a finding that stops jobs from running, or breaks a promise."""
    return Finding(check, Level.ERROR, found, meaning, remedy)


def graded(value: float, bounds: tuple[float, float]) -> Callable[..., Finding]:
    """Return `warning` or `error` for a value above the first bound: `error` from the second bound on."""
    return error if value > bounds[1] else warning
