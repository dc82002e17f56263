"""Tests of which CI takes a few rows, and the full walk all: `@pytest.mark.few(3)`.

Of the rows that a test has through a PgBouncer beside its direct ones CI takes one: the rows differ in the things that
are asked of the store, and the way to it is the same.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

EVERY_TEST = "SIDEJOB_TEST_PGBOUNCER"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "few(count): so many rows by their names, evenly spread, and the last; the others are slow"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all rows but a few as slow; rows through a PgBouncer are chosen by themselves."""
    rows: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") is not None or is_second_way(item):
            rows[item.nodeid.partition("[")[0], is_second_way(item)].append(item)
    for (_, second_way), found in rows.items():
        mark = found[0].get_closest_marker("few")
        taken = chosen(len(found), 1 if mark is None or second_way else mark.args[0])
        for place, item in enumerate(sorted(found, key=lambda item: item.nodeid)):  # else the random order decides
            if place not in taken:
                item.add_marker(pytest.mark.slow)


def is_second_way(item: pytest.Item) -> bool:
    """Tell whether a test runs through a PgBouncer here, and directly too."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("pooled") is True and not os.environ.get(EVERY_TEST)


def chosen(rows: int, count: int) -> set[int]:
    """Return the places of the rows that CI takes: the last, and others at even distances before it."""
    count = min(count, rows)
    return {rows - 1 - (place * rows) // count for place in range(count)}
