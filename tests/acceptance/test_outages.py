"""Brokers that are emptied, refuse or fall silent, and stores that go away: everything finishes, nothing runs twice."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from celery_sidejob import Job, embedded
from celery_sidejob.hooks.broker import connection
from tests.acceptance.outage_site import Site, site_of
from tests.tools.brokers import Broker
from tests.tools.databases import prepare_template
from tests.tools.proxy import TcpProxy
from tests.tools.recorder import Record
from tests.tools.waiting import patient, wait_until
from tests.tools.workers import Processes

MANY = int(os.environ.get("SIDEJOB_TEST_MANY", "1000"))
"""Jobs in a broker that is emptied; the full size is 5000."""
ATTEMPT_S = 1.0
LEASE_S = 3.0


# -- brokers that lose everything ------------------------------------------------------------------------------------


@pytest.fixture
def emptiable(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, own_valkey: embedded.Valkey
) -> Iterator[Site]:
    """A site whose broker this test may empty; what tells of the emptying is the marker alone."""
    with site_of(
        tmp_path, processes, record, broker_url=own_valkey.url, sidejob_database_url=database_url,
        sidejob_lost_after=600,
    ) as made:  # fmt: skip
        yield made
        made.quiet()


@pytest.mark.slow
def test_an_emptied_broker_delays_jobs_and_loses_none(emptiable: Site, own_valkey: embedded.Valkey) -> None:
    site = emptiable
    gate = site.hold("gate", [1])
    site.start_worker()
    site.record.wait_for("holding", job=gate.id)
    site.sidejob.enqueue_many([{"task": "outage.count"} for _ in range(MANY)])
    wait_until(lambda: published(site) == MANY, message="all jobs to be published")
    site.start_worker(concurrency=2, queues="other")  # it sweeps or follows, whichever comes first

    empty(own_valkey)
    site.open("gate")

    site.wait_for_count("completed", MANY + 1, timeout=50)
    assert site.job_row(gate)["run_no"] == 1
    site.nothing_lost()


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
def test_a_broker_emptied_more_often_than_losses_are_allowed_buries_nothing(
    emptiable: Site, own_valkey: embedded.Valkey
) -> None:
    site = emptiable
    gates = [site.hold("gate") for _ in range(2)]
    site.start_worker(concurrency=2)
    wait_until_held(site, gates)
    jobs = [site.sidejob.enqueue("outage.note") for _ in range(20)]

    for _ in range(site.sidejob.settings.max_losses + 1):
        wait_until(lambda: published(site) == len(jobs), timeout=20, message="all jobs to be published again")
        empty(own_valkey)
        wait_until(lambda: queued_in(own_valkey) > 0, timeout=20, message="the sweeper to notice")
    site.open("gate")

    for job in [*gates, *jobs]:
        assert site.wait_for(job, "completed")["run_no"] == 1
    site.nothing_lost()


# -- brokers that refuse or are silent -------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["refuse", "black_hole"])
def test_a_client_tries_a_broken_broker_once_and_then_leaves_it_alone(
    tmp_path: Path,
    processes: Processes,
    record: Record,
    database_url: str,
    broker: Broker,
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/durable.md: the call waits a second at most, once for each pause."""
    monkeypatch.setattr(connection, "PAUSE_S", (600.0, 600.0))  # longer than 40 calls take on a slow machine
    with TcpProxy.to(broker.url) as proxy:
        with site_of(
            tmp_path,
            processes,
            record,
            **broker.at(proxy.url_for(broker.url)).configuration,
            sidejob_database_url=database_url,
        ) as site:
            jobs = [site.sidejob.enqueue("outage.note")]  # everything is connected
            before = proxy.connections, proxy.bytes_up
            getattr(proxy, failure)()

            began = time.monotonic()
            jobs.append(site.sidejob.enqueue("outage.note"))
            first_s = time.monotonic() - began
            tried = proxy.connections
            jobs += [site.sidejob.enqueue("outage.note") for _ in range(40)]
            others_s = time.monotonic() - began - first_s

            assert first_s < patient(2.5 * ATTEMPT_S)
            assert others_s < 40 * ATTEMPT_S, "as long as if each had waited"
            assert proxy.connections == tried <= before[0] + 2
            assert proxy.bytes_up == before[1]

            proxy.pass_through()
            site.start_worker()
            for job in jobs:
                assert site.wait_for(job, "completed")["run_no"] == 1
            site.nothing_lost()
            site.quiet()


@pytest.mark.parametrize(
    ("failure", "only_pool"),
    [
        ("refuse", None),
        ("black_hole", None),
        pytest.param("refuse", "gevent", id="refuse, while kombu's pauses would stop all greenlets"),
    ],
)
def test_what_workers_could_not_publish_goes_out_when_the_broker_is_back(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker, failure: str,
    only_pool: str | None,
) -> None:  # fmt: skip
    """The worker's own fetching is Celery's; what a run asks for is ours."""
    with TcpProxy.to(broker.url) as proxy:
        with site_of(
            tmp_path, processes, record, **broker.at(proxy.url_for(broker.url)).configuration,
            sidejob_database_url=database_url,
            broker_transport_options={"socket_timeout": 3, "socket_connect_timeout": 3} if broker.is_redis else {},
        ) as site:  # fmt: skip
            asked = site.hold("gate", [1])
            site.start_worker(pool=only_pool)
            site.record.wait_for("holding", job=asked.id)

            getattr(proxy, failure)()
            asked.run()  # again, after this run
            site.open("gate")
            wait_until(lambda: site.job_row(asked)["ended_run"] == 1, timeout=15, message="the first run to end")
            proxy.pass_through()
            # Now and then kombu's Redis transport ends its worker when it loses the broker with messages unacknowledged
            # (AttributeError in restore_unacked); a supervisor would start another.
            site.start_worker(name="another")

            assert site.wait_for(asked, "completed", timeout=40)["run_no"] == 2
            site.nothing_lost()


# -- stores that go away ---------------------------------------------------------------------------------------------


@pytest.fixture
def perishable(
    tmp_path: Path, processes: Processes, record: Record, own_postgres: embedded.Postgres, broker: Broker
) -> Iterator[Site]:
    """A site whose store this test may take away, with a short lease."""
    prepare_template(own_postgres.url)
    with site_of(
        tmp_path, processes, record, **broker.configuration, sidejob_database_url=own_postgres.url,
        sidejob_lease=LEASE_S, sidejob_heartbeat_interval=0.5,
    ) as made:  # fmt: skip
        yield made
        made.quiet()


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_restart_of_the_store_under_running_jobs(perishable: Site, own_postgres: embedded.Postgres, how: str) -> None:
    site = perishable
    jobs = [site.hold("gate", [number], queue=f"queue{number // 2}") for number in range(4)]
    workers = [
        site.start_worker(concurrency=2, queues="queue0"),
        site.start_worker(pool="threads", concurrency=2, queues="queue1"),
    ]
    wait_until_held(site, jobs)
    before = len(own_workers(site))

    if how == "kill":
        own_postgres.kill()
        own_postgres.start()
    else:
        own_postgres.restart()
    wait_for_beats(site, before)
    site.open("gate")

    assert_ran_through(site, jobs)
    later = site.sidejob.enqueue("outage.note", queue="queue0")
    assert site.wait_for(later, "completed")["run_no"] == 1
    assert all(worker.alive for worker in workers)


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
def test_a_store_away_for_longer_than_the_lease(perishable: Site, own_postgres: embedded.Postgres) -> None:
    site = perishable
    jobs = [site.hold("gate", [number], queue=f"queue{number // 2}") for number in range(4)]
    workers = [site.start_worker(concurrency=2, queues=f"queue{number}") for number in range(2)]
    wait_until_held(site, jobs)
    before = len(own_workers(site))

    own_postgres.kill()
    away_for(2 * LEASE_S)
    own_postgres.start()
    wait_for_beats(site, before)
    site.open("gate")

    assert_ran_through(site, jobs)
    assert all(worker.alive for worker in workers)


@pytest.mark.few(0)
@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
def test_runs_that_end_while_the_store_is_away_for_longer_than_the_lease(
    perishable: Site, own_postgres: embedded.Postgres
) -> None:
    """Their ends cannot be written in time, so they run again; that is not the job's failure."""
    site = perishable
    jobs = [site.hold("gate", [number]) for number in range(2)]
    site.start_worker(concurrency=2)
    wait_until_held(site, jobs)

    own_postgres.kill()
    site.open("gate")
    site.record.wait_for("passed", count=2)
    away_for(2 * LEASE_S)
    own_postgres.start()

    for number, job in enumerate(jobs):
        row = site.wait_for(job, "completed", timeout=40)
        assert row["run_no"] <= 2
        assert {tuple(line["read"]) for line in site.record.of("passed", job=job.id)} == {(number,)}
        assert len(job.input("numbers")) == 0
    assert site.rows("SELECT * FROM dead") == []


# -- what is looked at -----------------------------------------------------------------------------------------------


def wait_until_held(site: Site, jobs: list[Job]) -> None:
    """Return once the bodies of these jobs hold on."""
    for job in jobs:
        site.record.wait_for("holding", job=job.id)


def published(site: Site) -> int:
    """Return how many messages wait in the broker, as far as the store knows."""
    site.sidejob.runtime.connections.write_behind_now()
    return site.rows("SELECT count(*) n FROM messages WHERE published_at IS NOT NULL AND locked_by IS NULL")[0]["n"]


def empty(valkey: embedded.Valkey) -> None:
    """Take everything from a broker."""
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()


def queued_in(valkey: embedded.Valkey) -> int:
    """Return how many messages are in the broker's queue."""
    with redis.Redis.from_url(valkey.url) as client:
        return client.llen("celery")


def own_workers(site: Site) -> list[dict[str, object]]:
    """Return the workers that live, as the store knows them."""
    return site.rows("SELECT id, beat_at FROM workers WHERE dead_at IS NULL")


def wait_for_beats(site: Site, count: int) -> None:
    """Return once so many workers have beaten since the store came back, with their locks, twice."""

    def beaten() -> bool:
        rows = site.rows("""
            SELECT count(*) n FROM workers WHERE dead_at IS NULL AND suspect_at IS NULL AND locked
              AND beat_at > pg_postmaster_start_time() + interval '1.5 s'""")
        return rows[0]["n"] == count

    wait_until(beaten, timeout=20, message=f"{count} workers to beat again")


def assert_ran_through(site: Site, jobs: list[Job]) -> None:
    """Each job ended with the very run that was under way."""
    for number, job in enumerate(jobs):
        row = site.wait_for(job, "completed")
        assert row["run_no"] == 1
        assert [line["read"] for line in site.record.of("passed", job=job.id)] == [[number]]
    assert len(site.record.of("holding")) == len(jobs)
    site.nothing_lost()


def away_for(seconds: float) -> None:
    """Let time go by: how long something is away is the very thing that is tested."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= until, timeout=seconds + 5, interval=0.1)
