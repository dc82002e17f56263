"""Text as people read and write it: numbers with nouns, durations, moments.

And foreign text, made unable to move a cursor or hide a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import date, datetime, time
from typing import Any

from .checks import is_seconds

_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Default-ignorable characters: they have no width or look like a blank, though Python calls them printable."""
_BLANKS = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
"""Blanks other than a space, which Python does not call printable."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text with an escape, such as ``\x1b``, instead of each invisible character.

    Invisible are control characters, line breaks, characters without a width, characters that change the direction of
    writing, and lone surrogates; the characters in `keep` stay.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(one if one in keep or is_visible(one) else one.encode("unicode_escape").decode() for one in text)


def is_visible(character: str) -> bool:
    """Tell whether a character is visible, if only as a blank."""
    if not character.isprintable():
        return _BLANKS.match(character) is not None
    return not _INVISIBLE.match(character)


def one_line(message: str) -> str:
    """Return a message as one line."""
    return printable(" ".join(message.split()))


def cut(text: Any, most: int = 80) -> str:
    """Return a text, cut where it is long."""
    shown = str(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def plain(value: Any) -> str:
    """Return what stands in JSON for a value that JSON lacks."""
    return value.isoformat() if isinstance(value, datetime | date | time) else str(value)


class Shown:
    """A value for use in a format: its texts become printable, in any format."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(str(self._value))

    def __repr__(self) -> str:
        return printable(repr(self._value))


def counted(count: int, one: str, many: str) -> str:
    """Return a number with the right form of its noun or verb."""
    return f"{count:,} {one if count == 1 else many}"


def first_of(texts: Iterable[str], *, most: int = 5, separator: str = ", ") -> str:
    """Return the first texts, and the number of further ones."""
    every = list(texts)
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return separator.join(every[:most]) + more


UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""Seconds of each unit."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)", re.ASCII)


def seconds_from(text: str) -> float:
    """Return the seconds of a number, or of a duration such as 90s, 5min, 2h, 3d or 1w; ValueError for others."""
    found = _DURATION.fullmatch(text)
    try:
        seconds = float(found[1]) * UNITS[found[2]] if found else float(text)
        if is_seconds(seconds):
            return seconds
    except ValueError:
        pass
    raise ValueError(f"{text!r} is no duration: write 90, 5min, 2h, 3d or 1w, at most 300 years.")


def moment_from(text: str) -> datetime:
    """Return a moment such as 2026-11-28T10:30, in this machine's time zone unless it names another; or ValueError."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is no time such as 2026-11-28 or 2026-11-28T10:30.") from None


def since_from(text: str) -> datetime | float:
    """Return a moment, or the seconds of a duration until now: 2026-11-28T10:30, 2h; ValueError for others."""
    if _DURATION.fullmatch(text) or text.replace(".", "", 1).isdecimal():
        return seconds_from(text)
    try:
        return moment_from(text)
    except ValueError as error:
        raise ValueError(f"{str(error).removesuffix('.')}, and no duration such as 2h.") from None


def duration(seconds: float | None) -> str:
    """Return a duration as people read it."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"


def lasting(seconds: float) -> str:
    """Return how long something took, a short time in milliseconds."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else duration(seconds)
