"""The findings of `doctor`: their severity, their meaning, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


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


def check(name: str, all_well: str = "") -> Callable[[Callable[P, Iterable[Finding]]], Callable[P, Iterator[Finding]]]:
    """Make a function that yields findings the check of this name; `all_well` is its finding if it yields none."""

    def named(function: Callable[P, Iterable[Finding]]) -> Callable[P, Iterator[Finding]]:
        @wraps(function)
        def findings(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
            is_well = bool(all_well)
            for finding in function(*args, **kwargs):
                is_well = False
                yield finding if finding.check else replace(finding, check=name)
            if is_well:
                yield Finding(name, Level.OK, all_well)

        return findings

    return named


def well(found: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding("", Level.OK, found)


def warning(found: str, *, meaning: str, remedy: str, check: str = "") -> Finding:
    """Return a finding that a person should look into, although work goes on."""
    return Finding(check, Level.WARNING, found, meaning, remedy)


def error(found: str, *, meaning: str, remedy: str, check: str = "") -> Finding:
    """Return a finding that stops jobs from running, or breaks a promise."""
    return Finding(check, Level.ERROR, found, meaning, remedy)


def graded(value: float, bounds: tuple[float, float]) -> Callable[..., Finding]:
    """Return `warning` or `error` for a value above the first bound: `error` from the second bound on."""
    return error if value > bounds[1] else warning
