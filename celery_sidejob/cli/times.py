"""Times and durations, as people give them to a command."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Any

import click

from ..model.checks import is_seconds

UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""Seconds of each unit."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)", re.ASCII)


class Seconds(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A number of seconds, or a duration such as 90s, 5min, 2h, 3d or 1w."""

    name = "duration"

    def convert(self, value: Any, param: Any, context: Any) -> float:
        """Check it, and return the number of seconds."""
        found = _DURATION.fullmatch(str(value))
        try:
            seconds = float(found[1]) * UNITS[found[2]] if found else float(value)
        except ValueError:
            seconds = math.nan
        if not is_seconds(seconds):
            self.fail(f"{value!r} is no duration: write 90, 5min, 2h, 3d or 1w, at most 300 years.", param, context)
        return seconds


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A moment such as 2026-11-28 or 2026-11-28T10:30, in this machine's time zone unless it names another."""

    name = "time"

    def convert(self, value: Any, param: Any, context: Any) -> datetime:
        """Check it, and return it with its time zone."""
        try:
            return datetime.fromisoformat(str(value)).astimezone()
        except (ValueError, OverflowError, OSError):
            self.fail(f"{value!r} is no time such as 2026-11-28 or 2026-11-28T10:30.", param, context)


class Since(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A moment, or how long ago it was: 2026-11-28T10:30, 2h."""

    name = "time or duration"

    def convert(self, value: Any, param: Any, context: Any) -> datetime | float:
        """Check it, and return a moment or a number of seconds."""
        given = str(value)
        if _DURATION.fullmatch(given) or given.replace(".", "", 1).isdecimal():
            return Seconds().convert(value, param, context)
        try:
            return Moment().convert(value, param, context)
        except click.BadParameter as error:
            self.fail(f"{error.message.removesuffix('.')}, and no duration such as 2h.", param, context)
