"""The store behind a PgBouncer in transaction mode: nothing relies on a session, and nothing is lost with the proxy.

Of the rest, those marked `pooled_too` run both ways; with SIDEJOB_TEST_PGBOUNCER=1 all go through one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from celery_sidejob import Job, embedded
from celery_sidejob.store.connection.own_executor import IDLE_S
from tests.acceptance.outage_site import Site, site_of
from tests.acceptance.scene import QUICK, Scene, Workload
from tests.tools.databases import prepare_template
from tests.tools.pgbouncer import APPLICATION, MISSING, PROGRAM, PgBouncer
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

LEASE_S = 4.0


@pytest.fixture
def pooled() -> bool:
    """All tests here go through the proxy."""
    return True


def test_the_workload_comes_to_its_end_though_workers_are_killed(scene: Scene) -> None:
    workers = [scene.worker(concurrency=2, **QUICK) for _ in range(2)]
    workload = Workload.start(scene)

    scene.record.wait_for("adder", timeout=20)
    os.kill((workers[0].children() or [workers[0].pid])[0], 9)
    scene.record.wait_for("adder", count=2, timeout=20)
    workers[1].kill_group()
    scene.worker(concurrency=2, **QUICK)

    scene.settle(50)
    workload.judge()


def test_all_but_the_liveness_locks_goes_through_the_proxy(scene: Scene, pgbouncer: PgBouncer) -> None:
    scene.worker(concurrency=2)
    scene.worker(pool="threads", concurrency=2)
    jobs = [scene.enqueue("adder") for _ in range(10)]
    for job in jobs:
        job.wait("completed", timeout=20)
    scene.sidejob.runtime.connections.close()

    ports = {int(scene.env["SIDEJOB_DATABASE_URL"].rpartition(":")[2].partition("/")[0])}
    assert ports == {pgbouncer.port}
    parents = [process.pid for process in scene.processes.started]
    direct = [connection for pid in parents for connection in to_postgres(pid, pgbouncer)]
    assert len(direct) == len(parents)
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
    assert scene.sql(locks)[0].count == len(parents)
    assert scene.sql("SELECT count(*) FROM pg_prepared_statements")[0].count == 0

    def only_the_parents() -> bool:
        clients = [
            client
            for client in pgbouncer.show("CLIENTS")
            if client["database"] in scene.database_url and client["application_name"] == APPLICATION
        ]
        return len(clients) <= 2 * len(parents)  # heartbeat and services

    wait_until(only_the_parents, timeout=3 * IDLE_S, message="idle connections to be closed")


def to_postgres(pid: int, proxy: PgBouncer) -> list[Any]:
    """The connections of a process and its children that go past the proxy."""
    target = int(proxy._target["port"])
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return [
        connection
        for process in family
        for connection in process.net_connections("tcp")
        if connection.raddr and connection.raddr.port == target and connection.status == psutil.CONN_ESTABLISHED
    ]


# -- proxies and stores that go away ---------------------------------------------------------------------------------


@pytest.fixture
def own_pgbouncer(own_postgres: embedded.Postgres) -> Iterator[PgBouncer]:
    """A PgBouncer that this test may kill and start again, before a Postgres of which the same is true."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    with PgBouncer(own_postgres.url) as server:
        yield server


@pytest.fixture
def perishable(
    tmp_path: Path, processes: Processes, record: Record, own_postgres: embedded.Postgres, own_pgbouncer: PgBouncer,
    redis_url: str,
) -> Iterator[Site]:  # fmt: skip
    """A site behind that proxy, with a short lease."""
    prepare_template(own_postgres.url)
    with site_of(
        tmp_path, processes, record, broker_url=redis_url, sidejob_direct_url=own_postgres.url,
        sidejob_database_url=own_pgbouncer.url_of(own_postgres.url), sidejob_lease=LEASE_S,
        sidejob_heartbeat_interval=0.5,
    ) as made:  # fmt: skip
        yield made
        made.quiet()


def restart_postgres(postgres: embedded.Postgres, proxy: PgBouncer) -> None:
    postgres.restart()


def kill_postgres(postgres: embedded.Postgres, proxy: PgBouncer) -> None:
    postgres.kill()
    postgres.start()


def kill_the_proxy(postgres: embedded.Postgres, proxy: PgBouncer) -> None:
    proxy.kill()
    proxy.start()


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
@pytest.mark.parametrize("outage", [restart_postgres, kill_postgres, kill_the_proxy])
def test_running_jobs_survive_an_outage(
    perishable: Site, own_postgres: embedded.Postgres, own_pgbouncer: PgBouncer,
    outage: Callable[[embedded.Postgres, PgBouncer], None],
) -> None:  # fmt: skip
    site = perishable
    jobs = [site.hold("gate", [number], queue=f"queue{number // 2}") for number in range(4)]
    workers = [site.start_worker(concurrency=2, queues=f"queue{number}") for number in range(2)]
    for job in jobs:
        site.record.wait_for("holding", job=job.id)

    outage(own_postgres, own_pgbouncer)
    wait_for_beats(site, len(workers))
    site.open("gate")

    ran_through(site, jobs)
    later = site.sidejob.enqueue("outage.note", queue="queue0")
    assert site.wait_for(later, "completed")["run_no"] == 1
    assert all(worker.alive for worker in workers)


@pytest.mark.few(0)
@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
def test_a_proxy_away_for_longer_than_the_lease(perishable: Site, own_pgbouncer: PgBouncer) -> None:
    """The locks are held all the while, and nobody can beat."""
    site = perishable
    jobs = [site.hold("gate", [number], queue=f"queue{number // 2}") for number in range(4)]
    workers = [site.start_worker(concurrency=2, queues=f"queue{number}") for number in range(2)]
    for job in jobs:
        site.record.wait_for("holding", job=job.id)

    own_pgbouncer.kill()
    overdue = f"SELECT 1 FROM workers HAVING max(beat_at) < now() - make_interval(secs => {2 * LEASE_S})"
    wait_until(lambda: site.rows(overdue), timeout=4 * LEASE_S, message="all workers to be silent for two leases")
    own_pgbouncer.start()
    wait_for_beats(site, len(workers))
    site.open("gate")

    ran_through(site, jobs)


def wait_for_beats(site: Site, count: int) -> None:
    """Return once so many workers have beaten from now on, and hold their locks."""
    began = site.rows("SELECT now() AS at")[0]["at"]

    def beaten() -> bool:
        rows = site.rows(
            "SELECT count(*) n FROM workers WHERE dead_at IS NULL AND suspect_at IS NULL AND locked AND beat_at > %s",
            began,
        )
        return rows[0]["n"] == count

    wait_until(beaten, timeout=30, message=f"{count} workers to beat again")


def ran_through(site: Site, jobs: list[Job]) -> None:
    """Each job ended with the very run that was under way."""
    for job in jobs:
        assert site.wait_for(job, "completed")["run_no"] == 1
    assert len(site.record.of("holding")) == len(jobs)
    site.nothing_lost()
