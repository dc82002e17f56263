"""Tells whether two values are written alike, and not merely equal: 1 and True are equal, and are not written alike."""

from __future__ import annotations

from datetime import datetime
from typing import Any

_WRITTEN_ALIKE = (str, int, bool, bytes, type(None))
"""Types whose equal values are written alike."""
_SHOWN_ALIKE = (float, datetime)
"""Types whose values are written alike if Python shows them alike: 0.0 equals -0.0, and noon is 13:00 elsewhere."""


def alike(one: Any, other: Any) -> bool:
    """Tell whether two values are written alike; False where only their types could tell."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(alike, one.values(), other.values()))
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if kind in _SHOWN_ALIKE:
        return repr(one) == repr(other)
    return kind in _WRITTEN_ALIKE and bool(one == other)
