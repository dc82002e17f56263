"""Tables in a narrow terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from celery_sidejob.cli.jobs import COLUMNS
from celery_sidejob.cli.output import table

AT = datetime(2031, 5, 1, 12, 30, tzinfo=UTC)
JOBS = [
    (12345678, "terminating: no worker", "shop.orders.add_up", "celery", "123450 / part", AT, AT, "999 ms"),
    (
        123457, "failed: ValueError: no money for the order of the customer Ann", "a" * 60, "celery", "", AT, AT,
        "59 min",
    ),
]  # fmt: skip


def printed(width: int, *columns: str, rows: list[tuple[Any, ...]]) -> list[str]:
    shown = StringIO()
    Console(file=shown, width=width).print(table(*columns, rows=rows))
    return shown.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_list_of_jobs_fits_a_terminal(width: int) -> None:
    lines = printed(width, *COLUMNS, rows=JOBS)

    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for whole in ("12345678", "123457", "terminating:", "failed:", "999 ms", "59 min"):
        assert whole in text
    assert text.count("2031-05-01") == 4
    assert text.count(f"{AT.astimezone():%H:%M:%S}") == 4
    assert text.count("a") > 60, "nothing of a long name is cut"


@pytest.mark.parametrize("column", ["Job", "Entry", "Task id", "Took"])
def test_a_value_that_is_copied_as_a_whole_is_in_one_line(column: str) -> None:
    value = "0123456789" * 3
    assert value in "\n".join(printed(44, column, "Task", rows=[(value, "a" * 60)]))


def test_a_table_that_fits_is_as_wide_as_its_values() -> None:
    assert printed(80, "Job", "Task", rows=[(1, "a")])[-1].rstrip() == " 1    a"


def test_a_terminal_that_is_too_narrow_for_anything_gets_what_there_is() -> None:
    assert len(printed(20, *COLUMNS, rows=JOBS)) > 3
