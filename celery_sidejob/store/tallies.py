"""Rows of `tallies`: what runs have taken, for each day, queue and task. No decision depends on them.

Each process of a worker adds what it has counted, from time to time, to the day and to the total of all days. The day
is that of the store's clock, in UTC, when it is stored. Days are forgotten; totals are not, since monitors read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from ..model.statistics import Amount, Measure, Tally
from .statement import Reader, Statement, Transaction

EVER = date(1970, 1, 1)
"""The day of the rows that have the totals of all days."""
_TODAY = "(now() AT TIME ZONE 'UTC')::date"

_ADD = Statement(f"""
INSERT INTO {{tallies}} AS t (day, queue, task, measure, bucket, number, total_us, squares_us)
SELECT d.day, r.* FROM unnest(%(queues)s::text[], %(tasks)s::text[], %(measures)s::text[], %(buckets)s::smallint[],
    %(numbers)s::bigint[], %(totals)s::numeric[], %(squares)s::numeric[])
  AS r(queue, task, measure, bucket, number, total_us, squares_us),
  unnest(ARRAY[%(ever)s::date, {_TODAY}]) AS d(day)
ORDER BY 1, 2, 3, 4, 5
ON CONFLICT (day, queue, task, measure, bucket) DO UPDATE SET number = t.number + excluded.number,
  total_us = t.total_us + excluded.total_us, squares_us = t.squares_us + excluded.squares_us""")


def add(executor: Transaction, amounts: Mapping[Tally, Amount]) -> None:
    """Add to today and to the totals; two processes that add at the same time lock the rows in the same order."""
    executor.run(
        _ADD,
        ever=EVER,
        queues=[tally.queue for tally in amounts],
        tasks=[tally.task for tally in amounts],
        measures=[str(tally.measure) for tally in amounts],
        buckets=[tally.bucket for tally in amounts],
        numbers=[amount.number for amount in amounts.values()],
        totals=[amount.total_us for amount in amounts.values()],
        squares=[amount.squares_us for amount in amounts.values()],
    )


_READ = Statement("""
SELECT t.queue, t.task, t.measure, t.bucket, sum(t.number)::bigint AS number, sum(t.total_us)::text AS total_us,
  sum(t.squares_us)::text AS squares_us
FROM {tallies} t
WHERE (t.day = %(day)s::date OR %(day)s::date IS NULL AND t.day > %(ever)s::date)
  AND (%(queue)s::text IS NULL OR t.queue = %(queue)s) AND (%(task)s::text IS NULL OR t.task = %(task)s)
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4""")


def read(
    executor: Reader, *, queue: str | None = None, task: str | None = None, day: date | None = None
) -> Iterator[tuple[Tally, Amount]]:
    """Read the tallies of a day, of `EVER`, or (None) of all days that are kept, of all queues and tasks or of one."""
    for row in executor.run(_READ, queue=queue, task=task, day=day, ever=EVER):
        yield (
            Tally(row.queue, row.task, Measure(row.measure), row.bucket),
            Amount(row.number, int(row.total_us), int(row.squares_us)),
        )


_NAMES = Statement("SELECT DISTINCT t.task, t.queue FROM {tallies} t WHERE t.day = %(ever)s::date")


def names(executor: Reader) -> Sequence[Any]:
    """Read each (task, queue) of which there are totals."""
    return executor.run(_NAMES, ever=EVER)


_FORGET = Statement(f"""
DELETE FROM {{tallies}} WHERE day = (
  SELECT min(t.day) FROM {{tallies}} t WHERE t.day > %(ever)s::date AND t.day <= {_TODAY} - %(days)s::int)
RETURNING day""")


def forget(executor: Transaction, days: int) -> bool:
    """Forget the oldest day that is not among the last so many, today included; False if all are kept."""
    return bool(executor.run(_FORGET, days=days, ever=EVER))
