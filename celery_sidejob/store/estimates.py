"""Estimates from a sample of a table's pages, for counts of too many rows to make while a person waits.

A small table is read as a whole. Every estimate is marked as an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .statement import Reader, Statement

EXACT_PAGES = 1000
"""The most pages (of 8 kB) of a table that is read as a whole."""
SAMPLED_PAGES = 600
"""How many pages of a larger table are read to find out how its rows differ."""
COUNTING_PAGES = 300
"""How many pages of a larger table are read to find out only how many rows it has."""
JOINED_PAGES = 50
"""How many pages of a table are read if the job of each row is read as well."""
COUNTED = 10_000
"""The most rows that are counted one by one, if an index has just these rows."""
DIGITS = 3
SAMPLE = "TABLESAMPLE SYSTEM (%(percent)s) REPEATABLE (1)"
"""The same pages each time: a difference between two estimates is a real change, and the pages are in memory by then.
"""

_PAGES = {
    table: Statement(f"SELECT pg_relation_size('{{{table}}}'::regclass) / 8192 AS pages")
    for table in ("messages", "jobs", "timers", "askings", "dead")
}


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a table that is read."""

    percent: float

    @property
    def is_all(self) -> bool:
        """Whether counts are exact."""
        return self.percent >= 100

    def whole(self, count: int) -> int:
        """Return the rows of the whole table for this many rows in the share, rounded to the digits that are known."""
        number = count * 100 / self.percent
        return int(number) if self.is_all else int(float(f"{number:.{DIGITS}g}"))


@dataclass(frozen=True, slots=True)
class Count:
    """A number of rows."""

    number: int
    is_estimated: bool = False


def share(executor: Reader, table: str, *, exact: int | None = None, sampled: int | None = None) -> Share:
    """Return the share of a table to read: all of it up to `exact` pages, otherwise `sampled` pages."""
    pages = executor.run(_PAGES[table])[0].pages
    if pages <= (EXACT_PAGES if exact is None else exact):
        return Share(100.0)
    return Share(min(100.0, max(1e-4, 100.0 * (SAMPLED_PAGES if sampled is None else sampled) / pages)))


def share_joined(executor: Reader, table: str) -> Share:
    """Return the share of a table to read if the job of each row is read as well."""
    return share(executor, table, exact=JOINED_PAGES, sampled=JOINED_PAGES)


def count(executor: Reader, few: Statement, many: Statement, table: str) -> Count:
    """Count rows with `few`, which finds at most `COUNTED`; if it finds that many, estimate them with `many`."""
    found = executor.run(few)[0].rows
    if found < COUNTED:
        return Count(found)
    looked_at = share(executor, table, sampled=COUNTING_PAGES)
    sampled = executor.run(many, percent=looked_at.percent)[0].rows
    return Count(max(found, looked_at.whole(sampled)), not looked_at.is_all)


_FINISHED = Statement(f"""
SELECT count(*) AS jobs FROM {{jobs}} j {SAMPLE}
WHERE j.status IN ('completed', 'terminated') AND j.retention_s IS NULL AND j.retention_keep IS NULL""")


def finished(executor: Reader) -> int:
    """Estimate how many jobs are finished and have no retention of their own task."""
    looked_at = share(executor, "jobs", sampled=COUNTING_PAGES)
    return looked_at.whole(executor.run(_FINISHED, percent=looked_at.percent)[0].jobs)


_FAMILIES = Statement("""
SELECT f.parent_id, round(f.share * c.reltuples)::bigint AS children
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_stats s ON s.schemaname = n.nspname AND s.tablename = c.relname AND s.attname = 'parent_id'
  CROSS JOIN LATERAL unnest(s.most_common_vals::text::bigint[], s.most_common_freqs) AS f(parent_id, share)
WHERE c.oid = '{jobs}'::regclass AND f.share * c.reltuples >= %(least)s::real
  AND EXISTS (SELECT FROM {jobs} j WHERE j.id = f.parent_id) ORDER BY 2 DESC""")


def families(executor: Reader, *, least: int) -> Sequence[Any]:
    """Estimate which jobs have this many children, (parent_id, children), the largest families first.

    The figures are those of the last ANALYZE of the table.
    """
    return executor.run(_FAMILIES, least=least)
