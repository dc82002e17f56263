"""Tests of which CI takes a few rows, and the full walk all: `@pytest.mark.few(3)`."""

from __future__ import annotations

from collections import defaultdict

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "few(count): so many rows by their names, evenly spread, and the last; the others are slow"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all rows but a few as slow; rows through a PgBouncer are chosen by themselves."""
    rows: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") is not None:
            rows[item.nodeid.partition("[")[0], "pgbouncer" in item.name].append(item)
    for found in rows.values():
        mark = found[0].get_closest_marker("few")
        assert mark is not None
        taken = chosen(len(found), mark.args[0])
        for place, item in enumerate(sorted(found, key=lambda item: item.nodeid)):  # else the random order decides
            if place not in taken:
                item.add_marker(pytest.mark.slow)


def chosen(rows: int, count: int) -> set[int]:
    """Return the places of the rows that CI takes: the last, and others at even distances before it."""
    count = min(count, rows)
    return {rows - 1 - (place * rows) // count for place in range(count)}
