"""Durations and moments as people write and read them."""

from __future__ import annotations

import re
from datetime import datetime

from .checks import is_seconds

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
