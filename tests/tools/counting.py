"""A process whose runs and steps are counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_sidejob.store.measured import MeasuredConnections
from tests.tools.in_process import Stage


@pytest.fixture
def counted(stage: Stage) -> Iterator[Stage]:
    """A process that counts, as a worker's does."""
    connections = connections_of(stage)
    connections.measures.take()
    connections.measures.begin()
    yield stage
    connections.measures.end()
    connections.measures.take()


def connections_of(stage: Stage) -> MeasuredConnections:
    """The connections of a stage, which count."""
    assert isinstance(stage.runtime.connections, MeasuredConnections)
    return stage.runtime.connections
