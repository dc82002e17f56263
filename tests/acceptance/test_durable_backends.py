"""Results and chords of durable tasks where the result backend is no Redis: a database, or the broker (RPC)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from celery import chain, chord

from tests.acceptance.durable_site import PROCESSES, TIMEOUT_S, Site
from tests.tools.brokers import Broker
from tests.tools.pgbouncer import direct
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

With = Callable[[str], Site]


@pytest.fixture
def using(database_url: str, broker: Broker, record: Record, processes: Processes) -> Iterator[With]:
    """Makes a site of this test's own with another result backend."""
    made: list[Site] = []

    def site(backend_url: str) -> Site:
        made.append(Site(database_url, replace(broker, backend_url=backend_url), record, processes))
        return made[0]

    yield site
    for one in made:
        one.close()


@PROCESSES
@pytest.mark.brokers("redis", only=["redis"], reason="its results are in a database, whatever the broker")
def test_a_database(using: With, database_url: str) -> None:
    """Celery polls for the parts of a chord by a task of its own, which is durable where it is named."""
    site = using("db+" + direct(database_url).replace("postgresql://", "postgresql+psycopg://"))
    plus = site.s("plus")
    site.app.conf.result_chord_retry_interval = 0.2
    slow = chord([site.s("holder", 1), site.s("plus", 1)])(plus)
    lost = chord([site.s("holder", 1), site.s("plus", 1)])(plus.clone().on_error(site.s("errback")))
    assert [row.task for row in site.rows() if row.task.startswith("celery.")] == ["celery.chord_unlock"] * 2
    site.empty_broker()
    worker = site.worker(concurrency=3)
    parts = [site.app.AsyncResult(one.parent.results[0].id) for one in (slow, lost)]
    pids = [site.holding(part)["pid"] for part in parts]

    os.kill(pids[1], signal.SIGKILL)
    site.record.wait_for("errback", timeout=TIMEOUT_S)
    site.empty_broker()  # with what polls for the other
    site.go(parts[0])

    assert slow.get(timeout=TIMEOUT_S) == 4
    assert site.call("plus", 1, link=plus).get(timeout=TIMEOUT_S) == 2
    site.wait_quiet()
    assert lost.state == "FAILURE"
    assert {(entry.task_id, entry.reason) for entry in site.dead()} == {(parts[1].id, "lost")}
    assert [len(site.ran(one)) for one in (slow, lost)] == [1, 0]
    assert worker.alive


@PROCESSES
def test_rpc(using: With) -> None:
    """Celery allows no chords there: that is said before anything is kept."""
    site = using("rpc://")
    with pytest.raises(NotImplementedError, match="does not support chords"):
        chord([site.s("plus", 1), site.s("plus", 2)])(site.s("plus"))
    assert site.rows() == []
    worker = site.worker(concurrency=2)

    retried, chained = site.call("retrying", 2), chain(site.s("plus", 1), site.s("plus")).apply_async()
    failed, lost = site.call("failing"), site.call("holder")
    os.kill(site.holding(lost)["pid"], signal.SIGKILL)

    assert retried.get(timeout=TIMEOUT_S) == 2
    assert chained.get(timeout=TIMEOUT_S) == 3
    with pytest.raises(ValueError, match="for good"):
        failed.get(timeout=TIMEOUT_S)
    with pytest.raises(Exception, match="The run was lost, and its task must not be repeated"):
        lost.get(timeout=TIMEOUT_S)
    site.wait_quiet()
    wait_until(lambda: len(site.dead()) == 2, timeout=TIMEOUT_S)
    assert worker.alive
