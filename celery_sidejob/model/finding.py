"""What `doctor` finds: how grave it is, what it means, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How grave a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `meaning` and `remedy` are empty where all is well."""

    check: str
    level: Level
    found: str
    meaning: str = ""
    remedy: str = ""


def well(check: str, found: str) -> Finding:
    """Return a finding that needs nobody."""
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, *, meaning: str, remedy: str) -> Finding:
    """Return a finding that somebody should look at, though work goes on."""
    return Finding(check, Level.WARNING, found, meaning, remedy)


def error(check: str, found: str, *, meaning: str, remedy: str) -> Finding:
    """Return a finding that keeps jobs from being run, or promises from being kept."""
    return Finding(check, Level.ERROR, found, meaning, remedy)
