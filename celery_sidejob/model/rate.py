"""The rate of a job's runs, as a token bucket: `run_rate="600/m"`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .checks import is_seconds

UNITS = {"s": 1, "m": 60, "h": 3600}
"""Seconds of each unit; they are those of Celery's `rate_limit`."""
MOST = 1_000_000
"""The largest number of runs per unit."""

FORM = f'runs per second, minute or hour, such as "600/m" or "0.5/s", above 0 and at most {MOST}'

ON_RUN_RATE = ("delay", "terminate")

_RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:/\s*([smh]))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rate:
    """A bucket of `burst` tokens, into which a token comes every `interval_s` seconds; each run takes one."""

    interval_s: float
    burst: int


def parse_rate(given: Any) -> Rate | None:
    """Read a rate: "600/m" is 600 runs at once, and then ten more in each second. None if it is not a rate.

    As for Celery's `rate_limit`, a number alone is runs per second.
    """
    runs, unit = given, "s"
    if isinstance(given, str):
        found = _RATE.fullmatch(given.strip())
        if found is None:
            return None
        runs, unit = float(found[1]), found[2] or "s"
    if not is_seconds(runs) or not 0 < runs <= MOST or not is_seconds(UNITS[unit] / runs):
        return None
    return Rate(UNITS[unit] / runs, max(1, int(runs)))
