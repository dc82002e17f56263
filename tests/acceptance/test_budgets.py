"""What a worker costs the store: how many connections, and no transaction while user code runs."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from celery_sidejob.store.connection.own_executor import IDLE_S
from tests.acceptance import checker
from tests.acceptance.outage_site import Site, site_fixture  # noqa: F401 - the fixture `site`
from tests.acceptance.scene import QUICK, Scene, Workload
from tests.tools.pgbouncer import client_ports
from tests.tools.waiting import wait_until

PARENT = 3
"""Liveness lock, heartbeat, services."""

OPEN_FOR_LONG = """
SELECT pid, state, xact_start, state_change, query FROM pg_stat_activity
WHERE application_name = 'celery_sidejob' AND datname = current_database()
  AND clock_timestamp() - xact_start > interval '0.5 s'"""


def connections_of_others(site: Site) -> int:
    """How many connections to the store this process has not: it may write late what its calls have left."""
    own = {one.laddr.port for one in psutil.Process().net_connections("tcp")}
    return len(set(client_ports(site.database_url)) - own)


@pytest.mark.few(1)
@pytest.mark.parametrize(("pool", "concurrency"), [("prefork", 2), ("solo", 1), ("threads", 2)])
def test_connections_of_a_busy_and_of_an_idle_worker(site: Site, pool: str, concurrency: int) -> None:
    site.start_worker(pool=pool, concurrency=concurrency)
    jobs = [site.sidejob.enqueue("outage.note") for _ in range(40)]
    site.sidejob.runtime.connections.write_behind_now()
    site.sidejob.runtime.connections.close()  # the client's own

    most = 0

    def all_completed() -> bool:
        nonlocal most
        most = max(most, connections_of_others(site))
        return site.rows("SELECT count(*) n FROM jobs WHERE status = 'completed'")[0]["n"] == len(jobs)

    wait_until(all_completed, timeout=30)
    assert most <= PARENT + concurrency

    wait_until(
        lambda: connections_of_others(site) <= PARENT,
        timeout=2 * IDLE_S, message="idle connections to be closed",
    )  # fmt: skip


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
def test_nothing_is_open_while_user_code_runs(site: Site) -> None:
    holding = [site.hold("gate", [1, 2]) for _ in range(2)]
    site.start_worker(concurrency=2)
    for job in holding:
        site.record.wait_for("holding", job=job.id)
    site.sidejob.runtime.connections.write_behind_now()
    site.sidejob.runtime.connections.close()

    # The connection of each process has been idle for its time, and not in a transaction, while the body goes on.
    samples: list[list[dict[str, Any]]] = []

    def only_the_parents() -> bool:
        samples.append(site.rows(OPEN_FOR_LONG))
        return connections_of_others(site) <= PARENT

    wait_until(only_the_parents, timeout=2 * IDLE_S, message="the connections of both processes to be closed")
    assert [rows for rows in samples if rows] == []
    assert {site.job_row(job)["status"] for job in holding} == {"running"}

    site.open("gate")
    for job in holding:
        assert site.wait_for(job, "completed")["run_no"] == 1


@pytest.mark.pooled_too
@pytest.mark.pools("prefork", reason="has no processes of its own")
def test_each_process_has_its_share(scene: Scene) -> None:
    """At most three for the parent and one for each process of the pool, whatever they do at once."""
    worker = scene.worker(concurrency=2, **QUICK)
    count_of = Sockets(scene, worker.pid)
    assert {count_of()[pid] for pid in worker.children()} == {0}, "none before the first claim"
    scene.sidejob.runtime.connections.close()
    most: Counter[int] = Counter()

    def sampled(done: Callable[[], bool]) -> bool:
        scene.sidejob.runtime.connections.close()
        for pid, count in count_of().items():
            most[pid] = max(most[pid], count)
        return done()

    workload = Workload.start(scene)
    wait_until(lambda: sampled(lambda: bool(scene.record.of("adder"))), timeout=20, interval=0)
    killed = worker.children()[0]
    os.kill(killed, signal.SIGKILL)
    revoked = scene.enqueue("holder", inports={"in": {"default": 1}})
    wait_until(lambda: sampled(lambda: bool(scene.record.of("holding"))), timeout=20, interval=0)
    scene.app.control.revoke(revoked.refresh().task_id, terminate=True, signal="SIGKILL")
    wait_until(lambda: sampled(lambda: not checker.unfinished(scene.eye)), timeout=50, interval=0)

    parent = most.pop(worker.pid)
    assert parent <= PARENT
    assert max(most.values()) == 1, "one that came late may have run nothing"
    assert str(revoked.refresh().status) == "failed"
    assert scene.sql("DELETE FROM dead RETURNING job_id") == [(revoked.id,)]
    workload.judge()


class Sockets:
    """Counts the connections to the store that the processes of a worker have, by process."""

    def __init__(self, scene: Scene, pid: int) -> None:
        self._scene = scene
        self._parent = psutil.Process(pid)

    def __call__(self) -> Counter[int]:
        """Return how many each has: of those the store knows as ours, the process that has the other end."""
        ports = set(client_ports(self._scene.database_url))
        counted: Counter[int] = Counter()
        for process in [self._parent, *self._parent.children()]:
            try:
                found = process.net_connections("tcp")
            except psutil.NoSuchProcess:
                continue
            own = {one.laddr.port for one in found if one.status == psutil.CONN_ESTABLISHED} & ports
            counted[process.pid] = len(own)
            ports -= own  # in the first moment after a fork a child has its parent's too
        return counted
