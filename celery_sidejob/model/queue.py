"""The settings of a managed queue: exact order, limits and a rate.

A rate of runs is a token bucket: "600/m". A job has one too, as `run_rate`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .capacity import PoolSpec
from .checks import did_you_mean, is_number, is_seconds, shown
from .errors import InvalidValueError

MOST = 1_000_000
"""The largest limit."""
KEYS = ("ordered", "limit", "limit_per_key", "rate")


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Any = _Unchanged()
"""Stands for a setting that does not change."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of a managed queue; None means no limit."""

    ordered: bool = False
    limit: int | None = None
    limit_per_key: int | None = None
    rate: Rate | None = None

    def with_(self, where: str, changes: Mapping[str, Any]) -> QueueSettings:
        """Return the settings with these changes; InvalidValueError if a value is not allowed."""
        unknown = next((key for key in changes if key not in KEYS), None)
        if unknown is not None:
            raise InvalidValueError(
                f"{where} has no setting {shown(unknown)}; there are {', '.join(KEYS)}.{did_you_mean(unknown, KEYS)}"
            )
        found: dict[str, Any] = {key: value for key, value in changes.items() if value is not UNCHANGED}
        if "ordered" in found and not isinstance(found["ordered"], bool):
            raise InvalidValueError(f"ordered of {where} is True or False, not {shown(found['ordered'])}.")
        for name in ("limit", "limit_per_key"):
            value = found.get(name)
            if value is not None and not is_number(value, least=1, most=MOST):
                raise InvalidValueError(
                    f"{name} of {where} is a number of runs at once, from 1 to {MOST}, or None, not {shown(value)}. "
                    "To let nothing run, pause the queue."
                )
        if found.get("rate") is not None:
            rate = parse_rate(found["rate"])
            if rate is None:
                raise InvalidValueError(f"rate of {where} is {RATE_FORM}, or None, not {shown(found['rate'])}.")
            found["rate"] = rate
        return replace(self, **found)


def without_pool(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a declaration without its capacity pool, which calls use directly."""
    return {name: value for name, value in settings.items() if name != "pool"}


def is_declaration(declared: Any) -> bool:
    """Tell whether a value can be `sidejob_queues`: queue names, each with valid settings."""
    if not isinstance(declared, Mapping):
        return False
    for name, settings in declared.items():
        if not isinstance(name, str) or not name or not isinstance(settings, Mapping):
            return False
        pool = settings.get("pool")
        if pool is not None and not isinstance(getattr(pool, "spec", None), PoolSpec):
            return False
        try:
            QueueSettings().with_(name, without_pool(settings))
        except InvalidValueError:
            return False
    return True


RATE_UNITS = {"s": 1, "m": 60, "h": 3600}
"""Seconds of each unit; they are those of Celery's `rate_limit`."""
MOST_RUNS = 1_000_000
"""The largest number of runs per unit of a rate."""

RATE_FORM = f'runs per second, minute or hour, such as "600/m" or "0.5/s", above 0 and at most {MOST_RUNS}'

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
    if not is_seconds(runs) or not 0 < runs <= MOST_RUNS or not is_seconds(RATE_UNITS[unit] / runs):
        return None
    return Rate(RATE_UNITS[unit] / runs, max(1, int(runs)))
