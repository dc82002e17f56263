"""Results and chords of durable tasks where the result backend is no Redis: a database, or the broker (RPC)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from celery import chain, chord

from tests.acceptance.durable_site import PROCESSES, SEVERAL, TIMEOUT_S, Site
from tests.tools.brokers import Broker
from tests.tools.pgbouncer import direct
from tests.tools.proxy import TcpProxy
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

With = Callable[[str], Site]


def results_in(database_url: str) -> str:
    """The URL of a result backend in a database."""
    return "db+" + direct(database_url).replace("postgresql://", "postgresql+psycopg://")


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
    site = using(results_in(database_url))
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
@pytest.mark.brokers("redis", only=["redis"], reason="its results are in a database, whatever the broker")
def test_the_task_that_waits_for_a_chord_runs_again_if_it_is_killed(using: With, database_url: str) -> None:
    site = using(results_in(database_url))
    site.app.conf.result_chord_retry_interval = 0.2
    result = chord([site.s("holder", 1), site.s("plus", 1)])(site.s("plus"))
    site.worker_with_a_crash("durable-move:before-commit", concurrency=2)  # it finds that a part still runs
    part = site.app.AsyncResult(result.parent.results[0].id)
    site.wait_for_crash()
    site.holding(part)
    site.go(part)

    assert result.get(timeout=TIMEOUT_S) == 4
    site.wait_quiet()
    assert (len(site.ran(result)), site.dead()) == (1, [])


@SEVERAL
@pytest.mark.brokers("redis", only=["redis"], reason="its results are elsewhere, whatever the broker")
@pytest.mark.parametrize("backend", ["redis", "database"])
def test_a_backend_that_is_away_changes_no_outcome(
    using: With, broker: Broker, database_url: str, backend: str
) -> None:
    url = broker.backend_url if backend == "redis" else results_in(database_url)
    site = using(url)
    with TcpProxy.to(url) as proxy:
        env = {"RESULT_BACKEND": proxy.url_for(url), "SIDEJOB_LEASE": "20"}
        worker = site.worker(concurrency=5, env=env)
        well = site.call("holder", 1, link=site.s("plus"))
        failed = site.call("holder", "fail", link_error=site.s("errback"))
        retried = site.call("held_and_retried", 0)
        joined = chord([site.s("holder", 1), site.s("holder", 2)])(site.s("plus").on_error(site.s("errback")))
        parts = joined.parent.results
        for result in (well, failed, retried, *parts):
            site.holding(result)

        proxy.refuse()
        site.go(well, failed, retried, *parts)
        for result in (well, failed, *parts):
            site.record.wait_for("ran", id=result.id, timeout=TIMEOUT_S)
        told = [f"That task {result.id} ended well cannot be told yet" for result in (well, *parts)]
        for line in [*told, f"{retried.id} is not shown as retried"]:
            worker.wait_for_log(line, TIMEOUT_S)
        proxy.pass_through()

        assert (well.get(timeout=TIMEOUT_S), retried.get(timeout=TIMEOUT_S)) == (1, None)
        assert well.children[0].get(timeout=TIMEOUT_S) == 2
        assert joined.get(timeout=TIMEOUT_S) == 4
        with pytest.raises(ValueError, match="for good"):
            failed.get(timeout=TIMEOUT_S)
        site.wait_quiet()
    assert [(entry.task_id, entry.reason, entry.error) for entry in site.dead()] == [
        (failed.id, "failed", "ValueError: for good")
    ]
    assert [len(site.ran(one)) for one in (well, failed, retried, *parts, joined)] == [1] * 6
    assert [one["of"] for one in site.record.of("errback")] == [failed.id]
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
