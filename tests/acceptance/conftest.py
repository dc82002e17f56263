"""One scene for each test. What is marked slow runs only with ``-m slow``: `pytest -m slow tests/acceptance`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.scene import Scene
from tests.tools.recorder import Record
from tests.tools.workers import Processes


@pytest.fixture
def scene(database_url: str, redis_url: str, record: Record, processes: Processes) -> Iterator[Scene]:
    """A store, a broker and a record of this test's own, and what starts workers on them."""
    made = Scene(database_url, redis_url, record, processes)
    yield made
    made.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: a walk that takes minutes; only with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, unless it is asked for."""
    if "slow" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.skip(reason="slow: pytest -m slow"))
