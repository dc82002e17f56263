"""Estimates from a sample of a table's pages, where there are too many rows to count while somebody waits.

A small table is its own sample: all of it. What is estimated says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from .statement import Reader, Statement

EXACT_PAGES = 1000
"""Pages (of 8 kB) of a table that is read as a whole."""
SAMPLED_PAGES = 600
"""Pages that are read of a larger one, to find out how its rows differ."""
COUNTING_PAGES = 300
"""Pages that are read of a larger one, to find out only how many rows it has."""
COUNTED = 10_000
"""Up to so many rows are counted one by one, where an index has just these rows."""
DIGITS = 3
SAMPLE = "TABLESAMPLE SYSTEM (%(percent)s) REPEATABLE (1)"
"""The same pages each time: what changes from one look to the next has changed, and they are in memory by then."""

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


def share(executor: Reader, table: str, *, exact: int | None = None, sampled: int | None = None) -> Share:
    """Return how much of a table is to be looked at: all of it up to `exact` pages, `sampled` pages of a larger one."""
    pages = executor.run(_PAGES[table])[0].pages
    if pages <= (EXACT_PAGES if exact is None else exact):
        return Share(100.0)
    return Share(min(100.0, max(1e-4, 100.0 * (SAMPLED_PAGES if sampled is None else sampled) / pages)))


def count(executor: Reader, few: Statement, many: Statement, table: str) -> Count:
    """Count rows with `few`, which finds `COUNTED` at most; if it finds so many, estimate them with `many`."""
    found = executor.run(few)[0].rows
    if found < COUNTED:
        return Count(found)
    looked_at = share(executor, table, sampled=COUNTING_PAGES)
    sampled = executor.run(many, percent=looked_at.percent)[0].rows
    return Count(max(found, looked_at.whole(sampled)), not looked_at.is_all)
