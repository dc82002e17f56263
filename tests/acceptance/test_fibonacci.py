"""A tree of some hundred jobs on eight processes: everything that wakes, suspends and reads, many times at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.brokers import Broker
from tests.tools.in_process import Stage
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

NODES = {12: 465}
"""Jobs in the tree of fibonacci(n): 2 * fibonacci(n + 1) - 1."""


@pytest.fixture
def client(database_url: str, broker: Broker) -> Iterator[Stage]:
    """A client without the tasks' code."""
    made = Stage(database_url, broker=broker.url)
    made.app.conf.update(broker.configuration)
    yield made
    made.close()


@pytest.mark.slow
def test_naive_fibonacci_on_eight_processes(
    client: Stage, database_url: str, broker: Broker, processes: Processes, record: Record
) -> None:
    env = {"DATABASE_URL": database_url, **broker.env, **record.env}
    processes.start_worker("tests.acceptance.fibonacci_app", env=env, concurrency=8)
    root = client.sidejob.enqueue("fibonacci", (12,))

    def quiet() -> bool:
        """The root ends for the last time when no end of a child asks it any more."""
        return client.sql("SELECT count(*) FROM messages") == [(0,)] and root.refresh().status == "completed"

    wait_until(quiet, timeout=90, message="the whole tree to be completed")
    assert list(root.output("result")) == [144]
    assert client.sidejob.count_jobs() == {"completed": NODES[12]}
    assert client.broken_rules() == []

    written = [line["job"] for line in record.of("written")]
    assert len(written) == len(set(written)) == NODES[12]
    assert client.row_counts()["packets"] == 0
