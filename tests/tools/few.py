"""A few rows of each test, where the whole suite is run: `--few`, as CI does. Without it each test has all its rows.

A test that starts processes has one row, one with a store two, any other all its rows. Which ones depends on the
test's name, so that of tests on several brokers one runs here, and another there. Of rows through a PgBouncer, which
run directly too, each module has one. `@pytest.mark.few(3)` says another number. A test with 0 takes long, and shorter
ones show its promise too.
"""

from __future__ import annotations

import os
from collections import defaultdict
from zlib import crc32

import pytest

EVERY_TEST = "SIDEJOB_TEST_PGBOUNCER"
PROCESSES = {"processes", "shared_place", "own_postgres", "own_valkey", "own_rabbitmq"}
SERVERS = {"databases", "redis_server_url", "rabbitmq"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few", action="store_true", help="a few rows of each test that has many and is dear")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "few(count): with --few so many rows, evenly spread")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all rows but a few."""
    if not config.getoption("--few"):
        return
    rows: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        rows[item.nodeid.partition("::" if is_second_way(item) else "[")[0], is_second_way(item)].append(item)
    left_out: set[pytest.Item] = set()
    for (name, second_way), found in rows.items():
        found.sort(key=lambda item: item.nodeid)  # else the random order decides
        taken = chosen(name, len(found), 1 if second_way else wanted(found[0]))
        left_out.update(item for place, item in enumerate(found) if place not in taken)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def wanted(item: pytest.Item) -> int:
    """Return how many rows of a test are run."""
    mark = item.get_closest_marker("few")
    if mark is not None:
        return int(mark.args[0])
    used = set(getattr(item, "fixturenames", ()))
    return 1 if used & PROCESSES else 2 if used & SERVERS else 1000


def is_second_way(item: pytest.Item) -> bool:
    """Tell whether a test runs through a PgBouncer here, and directly too."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("pooled") is True and not os.environ.get(EVERY_TEST)


def chosen(name: str, rows: int, count: int) -> set[int]:
    """Return the places of the rows that are run: at even distances, from a place that depends on the test's name."""
    count = min(count, rows)
    return {(crc32(name.encode()) + (place * rows) // count) % rows for place in range(count)}
