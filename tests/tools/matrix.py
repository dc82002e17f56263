"""What each cell of brokers and pools showed: a table at the end of a run that was given `--brokers` or `--pools`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

CELL = "cell"
OUTCOMES = ("passed", "failed", "error", "skipped")
ITS_OWN = "its own"
"""The pool of a test that chooses for itself."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note at each test in which cell it is; the report takes it along, from other processes too."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        given = callspec.params if callspec is not None else {}
        fixtures = getattr(item, "fixturenames", ())
        if "processes" not in fixtures and "shared_place" not in fixtures:
            continue  # it starts nothing
        pool = ITS_OWN if "pool" in given else given.get("worker_pool", "prefork")
        broker = given.get("broker_kind", "redis") if "broker_kind" in fixtures else ITS_OWN
        item.user_properties.append((CELL, (broker, pool)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    if config.getoption("--brokers") is None and config.getoption("--pools") == "prefork":
        return
    cells: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            for broker, pool in cells_of(report.user_properties):
                cells[broker, pool][outcome] += 1
    terminalreporter.section("brokers and pools")
    for broker, pool, *counts in [("broker", "pool", *OUTCOMES), *rows(cells)]:
        terminalreporter.write_line(f"{broker:10}{pool:10}" + "".join(f"{count:>9}" for count in counts))


def rows(cells: dict[tuple[str, str], Counter[str]]) -> Iterable[tuple[str, ...]]:
    """One row for each cell."""
    for cell, counted in sorted(cells.items()):
        yield (*cell, *(str(counted[outcome]) for outcome in OUTCOMES))


def cells_of(properties: Iterable[tuple[str, object]]) -> Iterable[tuple[str, str]]:
    """The cell that a report names, if any."""
    for name, value in properties:
        if name == CELL:
            broker, pool = value  # type: ignore[misc] # ours; from another process it is a list
            yield broker, pool
