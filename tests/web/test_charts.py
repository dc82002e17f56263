"""The charts of the overview: which column a run is in, and how high it is."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from celery_sidejob.web.drawing import CHART_HEIGHT, CHART_WIDTH, LEAST, chart_of, month_chart
from tests.tools.browsers import Browser
from tests.tools.in_process import Stage

NOW = datetime(2026, 11, 29, 12, 34, 56, tzinfo=UTC)


def test_a_sample_is_in_the_column_of_its_minute() -> None:
    ages = {0: (4, 1), 30: (2, 0), 57: (1, 1), 59 * 60: (8, 0), 61 * 60: (99, 99)}
    samples = [(NOW - timedelta(seconds=age), *counted) for age, counted in ages.items()]
    chart = chart_of("hour", samples, NOW)
    assert len(chart.columns) == 60
    assert chart.columns[0].began_at == datetime(2026, 11, 29, 11, 35, tzinfo=UTC)
    assert {place: (one.runs, one.failures) for place, one in enumerate(chart.columns) if one.runs} == {
        0: (8, 0), 58: (1, 1), 59: (6, 1)
    }  # fmt: skip
    assert (chart.runs, chart.failures, chart.most) == (15, 2, 8)


def test_the_columns_of_a_day_are_half_hours() -> None:
    ages = (0, 4, 5, 23 * 60, 25 * 60)
    chart = chart_of("day", [(NOW - timedelta(minutes=minutes), 1, 0) for minutes in ages], NOW)
    assert [(place, one.runs) for place, one in enumerate(chart.columns) if one.runs] == [(1, 1), (46, 1), (47, 2)]


def test_a_column_is_as_high_as_its_share_and_never_invisible() -> None:
    chart = month_chart({date(2026, 11, 29): (1000, 1), date(2026, 11, 28): (500, 500)}, date(2026, 11, 29))
    before, last = chart.columns[-2:]
    assert (last.height, last.failed_height) == (CHART_HEIGHT, LEAST)
    assert before.height == before.failed_height == CHART_HEIGHT / 2
    assert chart.columns[0].height == 0
    assert last.x + last.width <= CHART_WIDTH


def test_nothing_is_a_chart_too() -> None:
    assert chart_of("hour", [], NOW).most == 0


def test_the_overview_has_all_three(stage: Stage, reader: Browser) -> None:
    stage.sql("INSERT INTO run_samples VALUES (now() - interval '1 min', 0, 0), (now(), 7, 2)")
    stage.sql(
        "INSERT INTO tallies (day, queue, task, step, measure, bucket, number, total_us, squares_us) "
        "SELECT d, 'q', 't', '', m.measure, 3, m.number, 0, 0 "
        "FROM unnest(ARRAY['1970-01-01', current_date]) d, (VALUES ('run', 7), ('failure', 2)) m(measure, number)"
    )
    shown = reader.text("/")
    assert shown.count('class="chart"') == 3
    assert "Last hour: <b>7</b> runs" in shown
    assert "UTC: 7 runs, 2 failed" in shown
