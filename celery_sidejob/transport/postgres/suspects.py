"""Fetched messages whose workers died with them: given up after too many deaths, or delivered alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..begun import is_counted_by_a_row
from ..quarantine import Quarantine
from .dead import headers_of


class Sorted(NamedTuple):
    """Fetched messages, by what is to be done with them."""

    doomed: Sequence[Any]
    """Those that came back as often as they may."""
    delivered: Sequence[Any]
    released: Sequence[Any]
    """Those that would be charged with the death of another."""


def sort(found: Sequence[Any], quarantine: Quarantine) -> Sorted:
    """Decide what is done with fetched messages; one whose worker died with it begins a quarantine.

    The row that a reference leads to has a limit of its own.
    """
    doomed = [row for row in found if times_back(row) >= quarantine.limit]
    left = [row for row in found if times_back(row) < quarantine.limit]
    first = next((place for place, row in enumerate(left) if row.deaths and row.task_id is None), None)
    if first is None:
        return Sorted(doomed, left, ())
    if first == 0:
        quarantine.begin(left[0].id, times_back(left[0]))
    delivered = max(1, first)
    return Sorted(doomed, left[:delivered], left[delivered:])


def times_back(row: Any) -> int:
    """Return how often a message came back as the delivery limit counts: where a row counts, by deaths alone."""
    if not row.returns or row.task_id is not None:
        return 0
    return int(row.deaths if is_counted_by_a_row(headers_of(row.headers)) else row.returns)
