"""One scene for each test."""

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
