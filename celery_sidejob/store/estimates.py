"""Estimates from a sample of a table's pages, where there are too many rows to count while somebody waits.

A small table is its own sample: all of it. What is estimated says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from .statement import Executor, Statement

EXACT_PAGES = 4000
"""Pages (of 8 kB) of a table that is read as a whole."""
SAMPLED_PAGES = 1500
"""Pages that are read of a larger one."""
COUNTED = 20_000
"""Rows that are counted one by one where an index has just these."""
DIGITS = 3

_PAGES = {
    table: Statement(f"SELECT pg_relation_size('{{{table}}}'::regclass) / 8192 AS pages")
    for table in ("messages", "jobs", "timers", "askings", "dead")
}


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a table that is looked at."""

    percent: float

    @property
    def is_all(self) -> bool:
        """Whether what is counted is exact."""
        return self.percent >= 100

    def whole(self, count: int) -> int:
        """Return how many there are in all, if so many are in the share; with no more digits than are known."""
        number = count * 100 / self.percent
        return int(number) if self.is_all else int(float(f"{number:.{DIGITS}g}"))


@dataclass(frozen=True, slots=True)
class Count:
    """How many there are."""

    number: int
    is_estimated: bool = False


def share(executor: Executor, table: str, *, most: int | None = None) -> Share:
    """Return how much of a table is to be looked at; `most`: pages, where something else is read for each row."""
    pages = executor.run(_PAGES[table])[0].pages
    exact, sampled = (most, most) if most is not None else (EXACT_PAGES, SAMPLED_PAGES)
    return Share(100.0 if pages <= exact else min(100.0, max(1e-4, 100.0 * sampled / pages)))


def count(executor: Executor, few: Statement, many: Statement, table: str) -> Count:
    """Count rows with `few`, which finds `COUNTED` at most; if it finds so many, estimate them with `many`."""
    found = executor.run(few)[0].rows
    if found < COUNTED:
        return Count(found)
    looked_at = share(executor, table)
    sampled = executor.run(many, percent=looked_at.percent)[0].rows
    return Count(max(found, looked_at.whole(sampled)), not looked_at.is_all)
