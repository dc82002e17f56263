"""Durations are added up exactly, in whichever order and by whomever they were counted."""

from __future__ import annotations

import math
import statistics
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_sidejob import InvalidValueError
from celery_sidejob.model.events import Measure
from celery_sidejob.model.statistics import (
    BOUNDS_S,
    Amount,
    Measures,
    Statistics,
    Tally,
    day_of,
    durations_of,
    statistics_of,
    tally_of,
)


def of(*processes: Measures) -> Statistics:
    return statistics_of(
        (item for process in processes for item in process.take().tallies.items()), queue=None, task=None
    )


def counting() -> Measures:
    made = Measures()
    made.begin()
    return made


MICROSECONDS = st.integers(0, 10**13)


@given(st.lists(st.tuples(MICROSECONDS, st.integers(0, 3)), min_size=1, max_size=40))
@example([(10**12 + n % 3, n % 4) for n in range(40)])
def test_four_processes_together_know_what_one_would_have_known(found: list[tuple[int, int]]) -> None:
    together, apart = counting(), [counting() for _ in range(4)]
    for microseconds, process in found:
        for measures in (together, apart[process]):
            measures.tally("mail", "send", Measure.RUN, microseconds / 1e6)
    one, four = of(together), of(*apart)
    assert one == four
    seconds = [microseconds / 1e6 for microseconds, _ in found]
    assert one.runs.count == len(seconds)
    assert one.runs.sum_s == pytest.approx(math.fsum(seconds), abs=1e-6)
    assert one.runs.mean == pytest.approx(statistics.fmean(seconds), abs=1e-6)
    assert one.runs.std == pytest.approx(statistics.stdev(seconds) if len(seconds) > 1 else 0, abs=1e-5, rel=1e-6)
    expected = [
        sum(below < duration <= bound for duration in seconds)
        for below, bound in zip((-1.0, *BOUNDS_S), BOUNDS_S, strict=False)
    ]
    assert [count for _, count in one.runs.histogram] == expected
    assert [bound for bound, _ in one.runs.histogram] == list(BOUNDS_S)


def test_what_was_given_back_is_added_to_what_was_counted_since() -> None:
    measures = counting()
    measures.tally("mail", "send", Measure.WAIT, 2.0)
    taken = measures.take()
    measures.tally("mail", "send", Measure.WAIT, 2.0)
    measures.tally("mail", "other", Measure.LOSS)
    measures.give_back(taken)
    assert measures.take().tallies == {
        Tally("mail", "send", Measure.WAIT, BOUNDS_S.index(2.5)): Amount(2, 4_000_000, 8_000_000_000_000),
        Tally("mail", "other", Measure.LOSS, 0): Amount(1),
    }


def test_nothing_has_zeros() -> None:
    found = statistics_of([], queue="mail", task=None)
    assert (found.waits.count, found.waits.mean, found.waits.std, found.waits.sum_s) == (0, 0.0, 0.0, 0.0)
    assert (found.failures, found.retries, found.losses) == (0, 0, 0)
    assert found.waits == found.runs == durations_of({})


def test_a_clock_that_goes_back_counts_as_no_time() -> None:
    assert tally_of("mail", "send", Measure.WAIT, -3.0) == (Tally("mail", "send", Measure.WAIT, 0), Amount(1, 0, 0))


def test_as_a_document_it_has_only_values_of_json() -> None:
    document = statistics_of([tally_of("q", "t", Measure.RUN, 1e9)], queue="q", task="t", day=date(2026, 1, 2))
    shown = document.as_document()
    assert (shown["day"], shown["runs"]["histogram"][-1]) == ("2026-01-02", (None, 1))
    assert shown["waits"]["count"] == 0


def test_days() -> None:
    today = datetime.now(UTC).date()
    assert day_of("today") in (today, today + timedelta(days=1))
    assert day_of("today") == day_of("yesterday") + timedelta(days=1)  # type: ignore[operator]
    assert day_of("2024-02-29") == day_of(date(2024, 2, 29)) == date(2024, 2, 29)
    assert day_of(None) is None


@pytest.mark.parametrize("bad", ["2025-02-29", "monday", "", 5, datetime(2026, 1, 1), [], True])
def test_what_is_no_day_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"day= of statistics\(\) is a date"):
        day_of(bad)
