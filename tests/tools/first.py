"""Tests that run before all others: `pytestmark = pytest.mark.first`.

pytest-xdist deals out the tests in their order, a run of neighbours to each process. A module that is dear to prepare,
and is the first of all, is prepared by one process, wherever the random order would have cut it.
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "first: before all other tests, so that one process prepares the module")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move them to the front, once the order of the others is known."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
