"""Rows of `tallies`: waits and durations of runs and steps, for each day, queue, task and step. No decision depends
on them.

Each process of a worker adds its counts, from time to time, to the day and to the total of all days. The day is the
present day of the store's clock, in UTC. Days are forgotten; totals of runs are not, since monitors read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from ..model.statistics import Amount, Measure, Tally
from .statement import Reader, Statement, Transaction

EVER = date(1970, 1, 1)
"""The day of the rows with the totals of all days."""
_TODAY = "(now() AT TIME ZONE 'UTC')::date"

MOST_STEPS = 100
"""About the most names of steps that a task in a queue has; with a number in its name each step would have rows."""
OTHER = "other"
"""The name under which the steps with further names are counted."""

_ADD = Statement(f"""
INSERT INTO {{tallies}} AS t (day, queue, task, step, measure, bucket, number, total_us, squares_us)
SELECT d.day, r.* FROM unnest(%(queues)s::text[], %(tasks)s::text[], %(steps)s::text[], %(measures)s::text[],
    %(buckets)s::smallint[], %(numbers)s::bigint[], %(totals)s::numeric[], %(squares)s::numeric[])
  AS r(queue, task, step, measure, bucket, number, total_us, squares_us),
  unnest(ARRAY[%(ever)s::date, {_TODAY}]) AS d(day)
ORDER BY 1, 2, 3, 4, 5, 6
ON CONFLICT (day, queue, task, step, measure, bucket) DO UPDATE SET number = t.number + excluded.number,
  total_us = t.total_us + excluded.total_us, squares_us = t.squares_us + excluded.squares_us""")

_STEPS = Statement("""
SELECT DISTINCT t.queue, t.task, t.step FROM unnest(%(queues)s::text[], %(tasks)s::text[]) AS r(queue, task)
  JOIN {tallies} t ON t.day = %(ever)s::date AND t.queue = r.queue AND t.task = r.task AND t.step <> ''""")


def bounded(executor: Reader, amounts: Mapping[Tally, Amount]) -> dict[Tally, Amount]:
    """Return the amounts, with `OTHER` for new names of steps of a task that has `MOST_STEPS` of them already."""
    tasks = {(tally.queue, tally.task) for tally in amounts if tally.step}
    known: dict[tuple[str, str], set[str]] = {task: set() for task in tasks}
    given = {"queues": [queue for queue, _ in tasks], "tasks": [task for _, task in tasks]}
    for row in executor.run(_STEPS, ever=EVER, **given) if tasks else ():
        known[row.queue, row.task].add(row.step)
    found: dict[Tally, Amount] = {}
    for tally, amount in amounts.items():
        counted = tally
        if tally.step and tally.step not in (names := known[tally.queue, tally.task]):
            if len(names) < MOST_STEPS:
                names.add(tally.step)
            else:
                counted = tally._replace(step=OTHER)
        found[counted] = found.get(counted, Amount()).plus(amount)
    return found


def add(executor: Transaction, amounts: Mapping[Tally, Amount]) -> None:
    """Add to today and to the totals; two processes that add at the same time lock the rows in the same order."""
    executor.run(
        _ADD,
        ever=EVER,
        queues=[tally.queue for tally in amounts],
        tasks=[tally.task for tally in amounts],
        steps=[tally.step for tally in amounts],
        measures=[str(tally.measure) for tally in amounts],
        buckets=[tally.bucket for tally in amounts],
        numbers=[amount.number for amount in amounts.values()],
        totals=[amount.total_us for amount in amounts.values()],
        squares=[amount.squares_us for amount in amounts.values()],
    )


_READ = Statement("""
SELECT t.queue, t.task, t.step, t.measure, t.bucket, sum(t.number)::bigint AS number, sum(t.total_us)::text AS total_us,
  sum(t.squares_us)::text AS squares_us
FROM {tallies} t
WHERE (t.day = %(day)s::date OR %(day)s::date IS NULL AND t.day > %(ever)s::date)
  AND (%(queue)s::text IS NULL OR t.queue = %(queue)s) AND (%(task)s::text IS NULL OR t.task = %(task)s)
  AND (%(step)s::text IS NULL OR t.step = %(step)s)
GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5""")


def read(
    executor: Reader,
    *,
    queue: str | None = None,
    task: str | None = None,
    day: date | None = None,
    step: str | None = "",
) -> Iterator[tuple[Tally, Amount]]:
    """Read the tallies of a day, of `EVER`, or (None) of all kept days, for all queues and tasks or for one.

    By default they are those of runs; with `step` those of a step, and with None those of runs and of all steps.
    """
    for row in executor.run(_READ, queue=queue, task=task, step=step, day=day, ever=EVER):
        yield (
            Tally(row.queue, row.task, Measure(row.measure), row.bucket, row.step),
            Amount(row.number, int(row.total_us), int(row.squares_us)),
        )


_DAYS = Statement("""
SELECT t.day, coalesce(sum(t.number) FILTER (WHERE t.measure = %(run)s), 0)::bigint AS runs,
  coalesce(sum(t.number) FILTER (WHERE t.measure = %(failure)s), 0)::bigint AS failures
FROM {tallies} t WHERE t.day > %(ever)s::date AND t.step = '' AND t.measure = ANY(ARRAY[%(run)s, %(failure)s]::text[])
GROUP BY 1""")


def days(executor: Reader) -> dict[date, tuple[int, int]]:
    """Read the numbers of runs and of failures of each day that is kept: {day: (runs, failures)}."""
    found = executor.run(_DAYS, ever=EVER, run=str(Measure.RUN), failure=str(Measure.FAILURE))
    return {row.day: (row.runs, row.failures) for row in found}


_NAMES = Statement("SELECT DISTINCT t.task, t.queue FROM {tallies} t WHERE t.day = %(ever)s::date")


def names(executor: Reader) -> Sequence[Any]:
    """Read each (task, queue) that has totals."""
    return executor.run(_NAMES, ever=EVER)


_FORGET = Statement(f"""
WITH gone AS (
  DELETE FROM {{tallies}} WHERE day = (
    SELECT min(t.day) FROM {{tallies}} t WHERE t.day > %(ever)s::date AND t.day <= {_TODAY} - %(days)s::int)
  RETURNING day),
unused AS (
  DELETE FROM {{tallies}} e USING (SELECT DISTINCT day FROM gone) g
  WHERE e.day = %(ever)s::date AND e.step <> '' AND NOT EXISTS (
    SELECT FROM {{tallies}} t
    WHERE t.day > g.day AND t.queue = e.queue AND t.task = e.task AND t.step = e.step))
SELECT DISTINCT day FROM gone""")


def forget(executor: Transaction, days: int) -> bool:
    """Forget the oldest day that is not among the last `days`, including today; False if all are kept.

    The totals of a step that no later day has are forgotten too: its name may have been one of many.
    """
    return bool(executor.run(_FORGET, days=days, ever=EVER))
