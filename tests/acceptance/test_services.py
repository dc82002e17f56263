"""The sweeper: by beat or by a worker, one at a time, whatever one row is like."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_sidejob.operations.runs import runs
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from tests.acceptance.outage_site import Site, site_fixture, site_of  # noqa: F401 - the fixture `site`
from tests.tools.brokers import APART, Broker
from tests.tools.proxy import TcpProxy
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes


@pytest.fixture
def offline(tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker) -> Iterator[Site]:
    """A client whose broker refuses: what it asks for is in the store alone."""
    with TcpProxy.to(broker.url) as proxy:
        proxy.refuse()
        configuration = broker.at(proxy.url_for(broker.url)).configuration
        with site_of(tmp_path, processes, record, **configuration, sidejob_database_url=database_url) as made:
            yield made
            made.quiet()


@contextmanager
def online(offline: Site, broker_url: str, **configuration: Any) -> Iterator[Site]:
    """The same site for those who reach the broker."""
    with site_of(
        offline.record.path.parent, offline._processes, offline.record,
        **offline.configuration | {"broker_url": broker_url} | configuration,
    ) as made:  # fmt: skip
        yield made


# -- beat ------------------------------------------------------------------------------------------------------------


def test_beat_and_workers_that_do_not_sweep_find_what_was_not_published(offline: Site, broker: Broker) -> None:
    jobs = [offline.sidejob.enqueue("outage.note") for _ in range(5)]
    later = offline.sidejob.enqueue("outage.note", countdown=1)
    with online(offline, broker.url, sidejob_worker_services=False, sidejob_poll_interval=1) as site:
        site.start_worker()
        site.start_beat()

        for job in [*jobs, later]:
            assert site.wait_for(job, "completed")["run_no"] == 1
        assert site.rows("SELECT holder FROM leases") == [{"holder": None}]
        site.nothing_lost()


@pytest.mark.brokers("redis", only=["redis", "sidejob"], reason="tells that what waits in a queue is not missing")
def test_poll_reports_what_it_did(offline: Site, broker: Broker) -> None:
    for _ in range(3):
        offline.sidejob.enqueue("outage.note")
    with online(offline, broker.url, sidejob_lost_after=1) as site:
        due = "SELECT count(*) n FROM messages WHERE next_check_at <= now() AND locked_by IS NULL"

        wait_until(lambda: site.rows(due)[0]["n"] == 3, message="three messages to be due")
        report = site.sidejob.poll()
        assert (report.published, report.missing, report.unpublished) == (3, 0, 0)
        assert report.broker_emptied  # nobody had put our marker there
        assert bool(report)

        assert not site.sidejob.poll()

        with redis.Redis.from_url(broker.redis_url) as server:
            assert server.llen("celery") == 3
            site.rows("UPDATE messages SET next_check_at = now() RETURNING 1")
            assert not site.sidejob.poll(), "all wait there"
            server.delete("celery")
        site.rows("UPDATE messages SET next_check_at = now() RETURNING 1")
        report = site.sidejob.poll()
        assert (report.published, report.missing, report.broker_emptied) == (3, 3, False)

        site.sidejob.enqueue("outage.note", countdown=0.2)
        wait_until(
            lambda: (
                site.rows("SELECT 1 FROM timers WHERE due_at <= now()")
                or site.rows("SELECT 1 FROM messages WHERE due_at <= now() AND published_at IS NULL")
            ),
            message="the timer to be due",
        )
        report = site.sidejob.poll()
        assert report.timers + report.published >= 1


def test_poll_rescues_what_a_dead_worker_held(site: Site) -> None:
    job = site.hold("gate", [1])
    runtime = site.sidejob.runtime
    heartbeat = Heartbeat(runtime)
    heartbeat.register()
    assert runs.claim(runtime, job.id, task=job.task, for_run=1, worker_id=heartbeat.worker_id) is not None
    assert not site.sidejob.poll().rescued
    heartbeat.close()  # as its death does

    reports = []

    def rescued() -> bool:
        reports.append(site.sidejob.poll())
        return reports[-1].rescued == 1

    wait_until(rescued, timeout=15, interval=0.1)
    assert sum(report.declared_dead for report in reports) == 1
    row = site.job_row(job)
    assert (row["status"], row["losses"], row["unit_no"]) == ("queued", 1, None)


# -- timers ----------------------------------------------------------------------------------------------------------


def test_timers_fire(site: Site) -> None:
    site.start_worker()
    job = site.sidejob.enqueue("outage.note", countdown=1)
    site.wait_for(job, "completed")
    first = site.record.of("ran", job=job.id)[0]["at"]

    job.run(countdown=1)
    job.run(countdown=2)

    times = [line["at"] for line in site.record.wait_for("ran", job=job.id, count=3)]
    assert times[1] - first > 1
    assert times[2] - times[1] > 0.4
    site.wait_for(job, "completed")


# -- bad rows --------------------------------------------------------------------------------------------------------


def test_a_task_that_no_worker_knows_blocks_nothing(site: Site) -> None:
    site.rows("""
        INSERT INTO registry (task, queue, options) VALUES ('nobody.knows', 'celery', '{"inports": {}, "outports": {}}')
        RETURNING task""")
    unknown = site.sidejob.enqueue("nobody.knows")
    worker = site.start_worker()
    jobs = [site.sidejob.enqueue("outage.note") for _ in range(5)]

    for job in jobs:
        site.wait_for(job, "completed")
    worker.wait_for_log(f"Job {unknown.id} is parked")
    assert site.job_row(unknown)["status"] == "queued"
    site.nothing_lost()


@pytest.mark.brokers("redis", only=APART, reason="has no queue that takes no messages: it is a name in the row")
@pytest.mark.parametrize("trouble", ["something else of that name", "a queue that is not declared"])
def test_a_queue_that_takes_no_messages_blocks_no_other(site: Site, broker: Broker, trouble: str) -> None:
    broker.occupy("broken")
    configuration = dict(site.configuration)
    if trouble == "a queue that is not declared":
        configuration["task_create_missing_queues"] = False
    bad = [site.sidejob.enqueue("outage.note", queue="broken") for _ in range(3)]
    good = [site.sidejob.enqueue("outage.note") for _ in range(3)]
    assert site.sidejob.runtime.broker.ready
    # As if nothing had been published, and everything were due.
    site.sidejob.runtime.connections.write_behind_now()
    site.rows("UPDATE messages SET published_at = NULL, next_check_at = now() RETURNING 1")

    with site_of(site.record.path.parent, site._processes, site.record, **configuration) as sweeping:
        for _ in range(3):
            report = sweeping.sidejob.poll()
            assert report.unpublished == len(bad)
            assert sweeping.sidejob.runtime.broker.ready
            site.rows("UPDATE messages SET next_check_at = now() WHERE queue = 'broken' RETURNING 1")
        sweeping.start_worker()
        for job in good:
            sweeping.wait_for(job, "completed")
        later = sweeping.sidejob.enqueue("outage.note")
        sweeping.wait_for(later, "completed", timeout=5)
    for job in bad:
        assert site.job_row(job)["status"] == "queued"


def test_a_result_backend_that_is_silent_blocks_no_sweep(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker
) -> None:
    """Results wait in the store; what is lost, due or missing meanwhile must not."""
    with TcpProxy.to(broker.backend_url) as proxy:
        configuration = {**broker.configuration, "result_backend": proxy.url_for(broker.backend_url)}
        with site_of(
            tmp_path, processes, record, **configuration, sidejob_database_url=database_url,
        ) as site:  # fmt: skip
            site.start_worker(pool="threads", concurrency=8)
            first = site.sidejob.enqueue("outage.note")
            site.wait_for(first, "completed")

            proxy.black_hole()
            jobs = [site.sidejob.enqueue("outage.note") for _ in range(3)]
            for job in jobs:
                site.wait_for(job, "completed")
            wait_until(
                lambda: not site.rows("SELECT 1 FROM askings WHERE closed_at > now() - interval '9 s'"),
                timeout=15,
                message="the results to be the sweeper's business",
            )
            late = site.sidejob.enqueue("outage.note", countdown=0.5)
            site.wait_for(late, "completed", timeout=10)

            proxy.pass_through()
            wait_until(lambda: all(job.result.state == "SUCCESS" for job in [first, *jobs, late]), timeout=20)


# -- one sweeper -----------------------------------------------------------------------------------------------------


def test_one_worker_sweeps_and_is_followed_when_it_dies(site: Site) -> None:
    workers = {number: site.start_worker(queues=f"queue{number}") for number in range(2)}
    idents = {row["id"]: row["ident"] for row in site.rows("SELECT id, ident FROM workers")}
    holder = wait_until(lambda: holder_of(site), message="one of them to sweep")
    assert len(idents) == 2

    (dying,) = [worker for worker in workers.values() if f":{worker.pid}:" in idents[holder]]
    dying.kill_group()
    follower = wait_until(lambda: holder_of(site, but=holder), timeout=5, message="the other to follow")

    assert follower in idents
    (living,) = [number for number, worker in workers.items() if worker is not dying]
    lost = site.sidejob.enqueue("outage.note", queue=f"queue{living}", countdown=0.5)
    site.wait_for(lost, "completed")


def holder_of(site: Site, but: int | None = None) -> int | None:
    """Return which worker sweeps, if it is another one than `but`."""
    holder = site.rows("SELECT holder FROM leases WHERE expires_at > now()")
    return holder[0]["holder"] if holder and holder[0]["holder"] != but else None
