"""What a call is given, looked at before anything is asked of the store: Postgres' own errors name no argument."""

from __future__ import annotations

from math import isfinite
from typing import Any

from .errors import InvalidValueError
from .names import why_not_storable

MOST = 2**63 - 1
"""The largest number that Postgres takes for a bigint."""
LONGEST_S = 10_000_000_000.0
"""Three hundred years; Postgres and Python have an end of their own not far beyond."""


def is_keepable(text: str) -> bool:
    """Tell whether Postgres could have such a text; nothing is found by any other."""
    return why_not_storable(text, max_length=len(text)) is None


def check_text(what: str, text: Any) -> None:
    """Raise InvalidValueError for what is no text, nor None, or can be in no row."""
    if text is None:
        return
    problem = why_not_storable(text, max_length=len(text)) if isinstance(text, str) else "it is not a string"
    if problem:
        raise InvalidValueError(f"{shown(text)} cannot be {what}=: {problem}")


def check_number(what: str, number: Any, *, least: int = 0, of: str = "number") -> None:
    """Raise InvalidValueError for what is no whole number from `least` on."""
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= MOST:
        raise InvalidValueError(f"{what} is a number of {of}, at least {least}, not {shown(number)}.")


def is_seconds(seconds: Any, *, least: float = 0.0) -> bool:
    """Tell whether these are seconds, and no more than anybody means."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    return number and isfinite(seconds) and least <= seconds <= LONGEST_S


def shown(value: Any) -> str:
    """Return how a value is shown in an error: shortened, and in ASCII."""
    try:
        text = ascii(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}…"
