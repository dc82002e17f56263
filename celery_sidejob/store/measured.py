"""Measures of workers: the connections that take them, and their rows. No decision depends on them.

`tallies`: waits and durations of runs and steps, for each day, queue, task and step. Each process of a worker adds its
counts, from time to time, to the day and to the total of all days. The day is the present day of the store's clock, in
UTC. Days are forgotten; totals of runs are not, since monitors read them.

`counters`: the totals of the workers' other counts. `run_samples`: how many runs and failures there were until then,
noted once a minute and kept for a day; runs in a time are the difference of two samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, TypeVar

from ..model.errors import SchemaError, StoreUnavailableError
from ..model.events import Measure
from ..model.logger import logger
from ..model.statistics import Amount, Measures, Tally, Total
from . import history
from .connection.connections import Connections
from .connection.own_executor import OwnExecutor
from .errors import OutcomeUnknown
from .statement import Autocommit, Reader, Statement, Transaction, arrays, columns

T = TypeVar("T")

EVERY_S = 10.0
"""Seconds after which a busy process stores its counts."""


class MeasuredConnections(Connections):
    """Times the transactions of runs, and stores this process's counts on a connection that is open anyway."""

    def __init__(self, *args: Any, task_history: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.measures = Measures(task_history=task_history)

    def timed(
        self, name: str, work: Callable[[OwnExecutor], T], *, single: bool = False, within_s: float | None = None
    ) -> T:
        """Run `work` like `transact`; time it from the request for a connection to the answer to the commit."""
        began = time.monotonic()
        result = self.transact(name, work, single=single, within_s=within_s)
        self.measures.time(name, time.monotonic() - began)
        if self.measures.begun and self.measures.age_s >= EVERY_S:
            self.record()  # in the thread whose connection has just become free, so that no other is opened
        return result

    def record(self) -> bool:
        """Add the counts since the last call to the totals in the store; False if there was nothing to store.

        Never raises for the store: a count must not disturb the work that it counts.
        """
        taken = self.measures.take()
        if not taken:
            return False

        def add(executor: OwnExecutor) -> None:
            if taken.totals:
                add_totals(executor, taken.totals)
            if taken.tallies:
                add_tallies(executor, bounded(executor, taken.tallies))
            if taken.finished:
                history.add_tasks(executor, taken.finished, keep=self.measures.task_history)

        single = sum(map(bool, taken)) == 1 and not any(tally.step for tally in taken.tallies)
        try:
            self.transact("record", add, single=single)
        except (OutcomeUnknown, SchemaError) as error:  # counting too little is better than counting twice
            logger.debug("The counts are not stored: %s", error)
        except StoreUnavailableError as error:
            self.measures.give_back(taken)
            logger.debug("The counts are stored later: %s", error)
        return True


EVER = date(1970, 1, 1)
"""The day of the rows with the totals of all days."""
_TODAY = "(now() AT TIME ZONE 'UTC')::date"

MOST_STEPS = 100
"""About the most names of steps that a task in a queue has; with a number in its name each step would have rows."""
OTHER = "other"
"""The name under which the steps with further names are counted."""

_ADD_TALLIES = Statement(f"""
INSERT INTO {{tallies}} AS t (day, queue, task, step, measure, bucket, number, total_us, squares_us)
SELECT d.day, r.* FROM unnest(%(queue)s::text[], %(task)s::text[], %(step)s::text[], %(measure)s::text[],
    %(bucket)s::smallint[], %(number)s::bigint[], %(total_us)s::numeric[], %(squares_us)s::numeric[])
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
    for row in executor.run(_STEPS, ever=EVER, **columns(tasks, "queues", "tasks")) if tasks else ():
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


def add_tallies(executor: Transaction, amounts: Mapping[Tally, Amount]) -> None:
    """Add to today and to the totals; two processes that add at the same time lock the rows in the same order."""
    executor.run(
        _ADD_TALLIES,
        ever=EVER,
        **arrays(amounts, "queue", "task", "step", "bucket"),
        measure=[str(tally.measure) for tally in amounts],
        **arrays(amounts.values(), "number", "total_us", "squares_us"),
    )


_TALLIES = Statement("""
SELECT t.queue, t.task, t.step, t.measure, t.bucket, sum(t.number)::bigint AS number, sum(t.total_us)::text AS total_us,
  sum(t.squares_us)::text AS squares_us
FROM {tallies} t
WHERE (t.day = %(day)s::date OR %(day)s::date IS NULL AND t.day > %(ever)s::date)
  AND (%(queue)s::text IS NULL OR t.queue = %(queue)s) AND (%(task)s::text IS NULL OR t.task = %(task)s)
  AND (%(step)s::text IS NULL OR t.step = %(step)s)
GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5""")


def tallies(
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
    for row in executor.run(_TALLIES, queue=queue, task=task, step=step, day=day, ever=EVER):
        yield (
            Tally(row.queue, row.task, Measure(row.measure), row.bucket, row.step),
            Amount(row.number, int(row.total_us), int(row.squares_us)),
        )


_OF_RUNS = {"ever": EVER, "run": str(Measure.RUN), "failure": str(Measure.FAILURE)}
_RUNS = """
      coalesce(sum(t.number) FILTER (WHERE t.measure = %(run)s), 0)::bigint AS runs,
      coalesce(sum(t.number) FILTER (WHERE t.measure = %(failure)s), 0)::bigint AS failures
    FROM {tallies} t WHERE t.step = '' AND t.measure = ANY(ARRAY[%(run)s, %(failure)s]::text[])"""
_DAYS = Statement(f"SELECT t.day, {_RUNS} AND t.day > %(ever)s::date GROUP BY 1")


def days(executor: Reader) -> dict[date, tuple[int, int]]:
    """Read the numbers of runs and of failures of each day that is kept: {day: (runs, failures)}."""
    return {row.day: (row.runs, row.failures) for row in executor.run(_DAYS, **_OF_RUNS)}


_TALLIED = Statement("SELECT DISTINCT t.task, t.queue FROM {tallies} t WHERE t.day = %(ever)s::date")


def tallied(executor: Reader) -> Sequence[Any]:
    """Read each (task, queue) that has totals."""
    return executor.run(_TALLIED, ever=EVER)


_FORGET_DAY = Statement(f"""
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


def forget_day(executor: Transaction, days: int) -> bool:
    """Forget the oldest day that is not among the last `days`, including today; False if all are kept.

    The totals of a step that no later day has are forgotten too: its name may have been one of many.
    """
    return bool(executor.run(_FORGET_DAY, days=days, ever=EVER))


_ADD_TOTALS = Statement("""
INSERT INTO {counters} (name, label, value)
SELECT r.name, r.label, r.value FROM unnest(%(names)s::text[], %(labels)s::text[], %(amounts)s::double precision[])
  AS r(name, label, value) ORDER BY r.name, r.label
ON CONFLICT (name, label) DO UPDATE SET value = {counters}.value + excluded.value""")


def add_totals(executor: Transaction, amounts: Mapping[Total, float]) -> None:
    """Add to the counters; two processes that add at the same time lock the rows in the same order."""
    given = columns(amounts.keys(), "names", "labels")
    executor.run(_ADD_TOTALS, **given, amounts=[float(amount) for amount in amounts.values()])


_READ_TOTALS = Statement("SELECT name, label, value FROM {counters}")


def totals(executor: Reader) -> dict[Total, float]:
    """Read all counters."""
    return {(row.name, row.label): row.value for row in executor.run(_READ_TOTALS)}


SAMPLED_EVERY_S = 60.0
KEPT_H = 25
"""The hours for which samples are kept: a day, and an hour before it from which its first runs are counted."""

_RUNS_UNTIL_NOW = f"SELECT {_RUNS} AND t.day = %(ever)s::date"
_TAKE_SAMPLE = Statement(f"""
WITH gone AS (DELETE FROM {{run_samples}} WHERE taken_at < now() - interval '{KEPT_H} h')
INSERT INTO {{run_samples}} (taken_at, runs, failures)
SELECT now(), totals.runs, totals.failures
FROM (SELECT WHERE NOT EXISTS (
    SELECT FROM {{run_samples}} s WHERE s.taken_at > now() - interval '{SAMPLED_EVERY_S - 5} s')) due
  CROSS JOIN LATERAL ({_RUNS_UNTIL_NOW}) totals
ON CONFLICT DO NOTHING RETURNING taken_at""")


def take_sample(connections: Autocommit) -> int:
    """Take a sample, unless the last one is less than a minute old, and remove old ones; returns the number taken."""
    return len(connections.run(_TAKE_SAMPLE, **_OF_RUNS))


_SAMPLES = Statement(f"""
SELECT s.taken_at, s.runs, s.failures FROM {{run_samples}} s
UNION ALL SELECT now(), totals.runs, totals.failures FROM ({_RUNS_UNTIL_NOW}) totals
ORDER BY 1""")


def samples(executor: Reader) -> Sequence[Any]:
    """Read (taken_at, runs, failures) of each sample, oldest first, and of this moment."""
    return executor.run(_SAMPLES, **_OF_RUNS)
