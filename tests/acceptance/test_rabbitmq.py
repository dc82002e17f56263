"""What is particular to RabbitMQ: prefetched messages, topology that vanishes, sockets that swallow what is sent."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import kombu
import pytest
from amqp.exceptions import NotFound

from celery_sidejob import Job
from tests.acceptance.outage_site import Site, site_fixture, site_of  # noqa: F401 - the fixture `site`
from tests.acceptance.scene import Scene, Workload
from tests.tools.brokers import Broker
from tests.tools.freezing import frozen
from tests.tools.proxy import TcpProxy
from tests.tools.rabbitmq import GivenRabbitMQ, Node, RabbitMQ
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

READS_ON = pytest.mark.pools(
    "prefork", "threads", "asyncio", "awaited", reason="reads nothing while its bodies run: see docs/rabbitmq.md"
)
ON_RABBITMQ = pytest.mark.brokers("amqp", only=["amqp", "quorum"], reason="is no RabbitMQ")
LOST_AFTER_S = 2.0
DELETIONS = 12
LOOKS = 3
"""How many times each message that waits is looked at before a test goes on."""


def published(site: Site) -> int:
    """Return how many messages wait in the broker, as far as the store knows."""
    site.sidejob.runtime.connections.write_behind_now()
    return site.rows("SELECT count(*) n FROM messages WHERE published_at IS NOT NULL AND locked_by IS NULL")[0]["n"]


def given_up(site: Site, job: Job) -> bool:
    """Whether the message of a job was called missing: each time doubles the wait until the next look."""
    return bool(site.rows("SELECT 1 FROM messages WHERE job_id = %s AND check_interval > %s * interval '1 s'", job.id,
                          site.sidejob.settings.lost_after))  # fmt: skip


def delete_queue(url: str, name: str) -> None:
    """Take a queue away, with what is in it."""
    with kombu.Connection(url) as connection:
        connection.default_channel.queue_delete(name)


def ready(url: str, name: str) -> int:
    """Return how many messages a queue has that nobody has fetched."""
    with kombu.Connection(url) as connection:
        return int(connection.default_channel.queue_declare(name, passive=True).message_count)


def consumers(url: str, name: str) -> int:
    """Return how many consume from a queue; none if there is no such queue."""
    with kombu.Connection(url) as connection, suppress(NotFound):
        return int(connection.default_channel.queue_declare(name, passive=True).consumer_count)
    return 0


@pytest.fixture
def impatient(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker,
    request: pytest.FixtureRequest,
) -> Iterator[Site]:  # fmt: skip
    """A site that calls a message missing soon, or after the seconds that are the parameter."""
    with site_of(
        tmp_path, processes, record, **broker.configuration, sidejob_database_url=database_url,
        sidejob_lost_after=getattr(request, "param", LOST_AFTER_S), sidejob_lease=6, sidejob_heartbeat_interval=0.5,
    ) as made:  # fmt: skip
        made.sidejob.poll()  # the first look at a fresh broker finds no marker: all is published once more
        yield made
        made.quiet()


# -- messages that wait ----------------------------------------------------------------------------------------------


@ON_RABBITMQ
@READS_ON
def test_a_message_that_waits_behind_a_long_run_is_not_called_lost_and_goes_to_another_worker(impatient: Site) -> None:
    site = impatient
    long = site.hold("gate")
    worker = site.start_worker()
    site.record.wait_for("holding", job=long.id)
    waiting = site.sidejob.enqueue_many([{"task": "outage.note"}] * 3)  # all are looked at together
    wait_until(lambda: published(site) == len(waiting), message="all to be published")
    wait_until(lambda: ready(site.app.conf.broker_url, "celery") == len(waiting), message="none to be fetched")

    wait_for_looks(site)

    assert [job.id for job in waiting if given_up(site, job)] == []
    assert ready(site.app.conf.broker_url, "celery") == len(waiting)  # and no copies
    worker.kill_group()
    site.start_worker()
    for job in waiting:
        assert site.wait_for(job, "completed")["run_no"] == 1
    site.open("gate")
    site.wait_for(long, "completed")


@ON_RABBITMQ
@READS_ON
@pytest.mark.parametrize("impatient", [4.0], indirect=True, ids=["4 s"])  # on a busy machine a heartbeat may take two
@pytest.mark.slow
def test_messages_that_wait_in_a_long_queue_are_not_called_lost(impatient: Site) -> None:
    site = impatient
    long = site.hold("gate")
    site.start_worker()
    site.record.wait_for("holding", job=long.id)
    waiting = [site.sidejob.enqueue("outage.note") for _ in range(20)]
    wait_until(lambda: published(site) == len(waiting), message="all to be published")
    before = wait_until(lambda: ready(site.app.conf.broker_url, "celery"), message="the worker to have fetched some")

    wait_for_looks(site)

    assert ready(site.app.conf.broker_url, "celery") == before
    site.open("gate")
    for job in waiting:
        assert site.wait_for(job, "completed")["run_no"] == 1


@pytest.mark.few(0)
@ON_RABBITMQ
@READS_ON
def test_what_a_worker_had_fetched_is_not_vouched_for_after_its_connection_broke(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker
) -> None:
    """RabbitMQ gives it to another worker; if it lost it instead, nobody may say that it waits.

    What comes by a queue that would go with its last consumer is fetched behind a long run, and not given back.
    """
    temporary = {"task_queues": {"celery": {"exchange": "celery", "queue_arguments": {"x-expires": 600_000}}}}
    with TcpProxy.to(broker.url) as proxy, site_of(
        tmp_path, processes, record, **broker.at(proxy.url_for(broker.url)).configuration,
        sidejob_database_url=database_url, sidejob_lost_after=LOST_AFTER_S, sidejob_heartbeat_interval=0.5, **temporary,
    ) as site:  # fmt: skip
        site.sidejob.poll()  # the first look at a fresh broker
        long = site.hold("gate")
        worker = site.start_worker()
        site.record.wait_for("holding", job=long.id)
        waiting = site.sidejob.enqueue("outage.note_once")
        wait_until(lambda: published(site) == 1, message="it to be published")
        worker.wait_for_log(f"{waiting.task_id}] received")
        wait_for_looks(site)  # by which it is vouched for
        assert "Gave back" not in worker.log()

        proxy.refuse()
        with kombu.Connection(broker.url) as connection:
            wait_until(lambda: ready(broker.url, "celery"), message="RabbitMQ to have it back")
            connection.default_channel.queue_purge("celery")
        proxy.pass_through()

        site.open("gate")
        assert site.wait_for(waiting, "completed", timeout=40)["run_no"] == 1
        site.nothing_lost()


def wait_for_looks(site: Site) -> None:
    """Wait until somebody has put off the next look at each message that waits, or has looked at it, several times."""
    seen: dict[str, set[Any]] = defaultdict(set)

    def looked_at() -> bool:
        rows = site.rows("SELECT task_id, next_check_at FROM messages WHERE locked_by IS NULL")
        for row in rows:
            seen[row["task_id"]].add(row["next_check_at"])
        return bool(rows) and all(len(seen[row["task_id"]]) > LOOKS for row in rows)

    wait_until(looked_at, timeout=60, interval=0.1, message=f"{LOOKS} looks at each message")


# -- topology that vanishes ------------------------------------------------------------------------------------------


@ON_RABBITMQ
def test_a_queue_that_is_deleted_while_jobs_wait_is_declared_again(site: Site) -> None:
    """Noticed by the look at each queue: `lost_after` is far away."""
    jobs = [site.sidejob.enqueue("outage.note", queue="vanishing") for _ in range(5)]
    assert published(site) == len(jobs)
    site.start_worker(queues="other")  # it sweeps
    wait_for_first_check(site)
    assert ready(site.app.conf.broker_url, "vanishing") == len(jobs)  # which gave it no copies

    delete_queue(site.app.conf.broker_url, "vanishing")

    wait_until(lambda: ready(site.app.conf.broker_url, "vanishing") == len(jobs), timeout=30,
               message="all to be published again")  # fmt: skip
    site.start_worker(queues="vanishing")
    for job in jobs:
        assert site.wait_for(job, "completed")["run_no"] == 1
    site.nothing_lost()


def wait_for_first_check(site: Site) -> None:
    """Wait until a sweeper has looked at a fresh broker."""
    marker = f"celery_sidejob.marker.{site.sidejob.settings.schema}"

    def is_there() -> bool:
        with kombu.Connection(site.app.conf.broker_url) as connection, suppress(NotFound):
            connection.default_channel.exchange_declare(marker, "fanout", passive=True)
            return True
        return False

    wait_until(is_there, timeout=30, message="the first look")


@ON_RABBITMQ
def test_a_publish_into_a_queue_that_is_gone_declares_it_again(site: Site) -> None:
    url = site.app.conf.broker_url
    first = site.sidejob.enqueue("outage.note", queue="vanishing")
    delete_queue(url, "vanishing")

    second = site.sidejob.enqueue("outage.note", queue="vanishing")

    assert ready(url, "vanishing") == 1
    site.start_worker(queues="vanishing")
    site.wait_for(second, "completed")
    site.sidejob.get(first.id).run()
    site.wait_for(first, "completed")


@pytest.mark.few(0)
@pytest.mark.brokers("quorum", only=["quorum"], reason="tells a worker of its queue's deletion")
def test_a_worker_that_a_quorum_queue_has_forgotten_consumes_again(site: Site) -> None:
    url = site.app.conf.broker_url
    workers = [site.start_worker(), site.start_worker()]
    wait_until(lambda: consumers(url, "celery") == 2, message="both to consume")
    with kombu.Connection(url) as connection:
        channel = connection.default_channel

        def forgotten() -> bool:
            channel.queue_delete("celery")
            channel.queue_declare("celery", durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
            return all(consumers(url, "celery") == 0 for _ in range(20))

        wait_until(forgotten, timeout=30, message="RabbitMQ to know no consumer: they survive the first time")
    job = site.sidejob.enqueue("outage.note")

    assert site.wait_for(job, "completed", timeout=40)["run_no"] == 1

    assert any("it connects again" in worker.log() for worker in workers)
    assert all(worker.alive for worker in workers)


@ON_RABBITMQ
def test_a_deleted_queue_does_not_end_its_worker(impatient: Site) -> None:
    site = impatient
    long = site.hold("gate")
    worker = site.start_worker()
    site.record.wait_for("holding", job=long.id)
    waiting = [site.sidejob.enqueue("outage.note") for _ in range(8)]
    wait_until(lambda: published(site) == len(waiting), message="all to be published")

    delete_queue(site.app.conf.broker_url, "celery")
    site.open("gate")

    for job in [long, *waiting]:
        assert site.wait_for(job, "completed", timeout=40)["run_no"] == 1
    assert worker.alive
    site.nothing_lost()


@pytest.mark.few(0)
@ON_RABBITMQ
def test_a_worker_whose_queue_is_deleted_again_and_again_hears_of_it_each_time(impatient: Site) -> None:
    """Also in the first moments of consuming, in which Celery's event loop passes over it."""
    site, url = impatient, impatient.app.conf.broker_url
    worker = site.start_worker()
    for _ in range(DELETIONS):
        wait_until(lambda: consumers(url, "celery"), timeout=40, interval=0.001, message="the worker to consume")
        delete_queue(url, "celery")

    job = site.sidejob.enqueue("outage.note")

    assert site.wait_for(job, "completed", timeout=40)["run_no"] == 1
    assert worker.alive
    wait_until(lambda: consumers(url, "celery") == 1, message="it to consume, and from one consumer")


@ON_RABBITMQ
def test_a_vhost_that_is_reset_delays_jobs_and_loses_none(
    site: Site, rabbitmq: Node | GivenRabbitMQ, vhost: str
) -> None:
    if not rabbitmq.may_administer:
        pytest.skip("we may not administer this RabbitMQ")
    long = site.hold("gate", [1])
    site.start_worker()
    site.record.wait_for("holding", job=long.id)
    jobs = [site.sidejob.enqueue("outage.note") for _ in range(20)]
    wait_until(lambda: published(site) == len(jobs), message="all to be published")

    rabbitmq.delete_vhost(vhost)
    rabbitmq.add_vhost(vhost)
    site.open("gate")

    for job in [long, *jobs]:
        assert site.wait_for(job, "completed", timeout=50)["run_no"] == 1
    site.nothing_lost()


# -- sockets that swallow what is sent -------------------------------------------------------------------------------


@ON_RABBITMQ
@pytest.mark.parametrize("failure", ["refuse", "black_hole"])
def test_a_publisher_whose_connection_swallows_messages_does_not_call_them_published(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker, failure: str
) -> None:
    with TcpProxy.to(broker.url) as proxy, site_of(
        tmp_path, processes, record, **broker.at(proxy.url_for(broker.url)).configuration,
        sidejob_database_url=database_url, sidejob_lost_after=600,
    ) as site:  # fmt: skip
        jobs = [site.sidejob.enqueue("outage.note")]
        assert published(site) == 1
        getattr(proxy, failure)()

        began = time.monotonic()
        jobs += [site.sidejob.enqueue("outage.note") for _ in range(10)]
        took_s = time.monotonic() - began

        assert took_s < 5
        assert published(site) == 1
        proxy.pass_through()
        site.start_worker()
        for job in jobs:
            assert site.wait_for(job, "completed", timeout=40)["run_no"] == 1
        site.nothing_lost()
        site.quiet()


@pytest.mark.brokers("amqp", only=["amqp"], reason="has no queue that takes one message and no more")
def test_a_queue_that_refuses_messages_has_none_of_them(site: Site) -> None:
    """A full queue that rejects: the messages are not called published, and other queues go on."""
    url = site.app.conf.broker_url
    queue = site.app.amqp.queues["full"]
    queue.queue_arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    jobs = [site.sidejob.enqueue("outage.note", queue="full") for _ in range(3)]
    other = site.sidejob.enqueue("outage.note", queue="free")

    site.sidejob.runtime.connections.write_behind_now()
    rows = site.rows("SELECT job_id FROM messages WHERE published_at IS NOT NULL ORDER BY job_id")

    assert [row["job_id"] for row in rows] == [jobs[0].id, other.id]
    assert ready(url, "full") == 1
    assert ready(url, "free") == 1


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
@pytest.mark.parametrize(
    "outage",
    [
        pytest.param("killed", marks=pytest.mark.slow),
        "frozen",
        pytest.param("restarted", marks=pytest.mark.slow),
        pytest.param("slow", marks=pytest.mark.slow),
    ],
)
def test_an_outage_of_the_broker_delays_jobs_and_loses_none(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, redis_url: str, own_rabbitmq: RabbitMQ,
    outage: str,
) -> None:  # fmt: skip
    """In each state: one job runs, some wait in the worker, some in the broker, some in the store."""
    with TcpProxy.to(own_rabbitmq.url) as proxy, site_of(
        tmp_path, processes, record, **Broker("amqp", proxy.url_for(own_rabbitmq.url), redis_url).configuration,
        sidejob_database_url=database_url, broker_heartbeat=4,
    ) as site:  # fmt: skip
        gates = [site.hold("gate", [number]) for number in range(2)]
        site.start_worker(concurrency=2)
        for job in gates:
            site.record.wait_for("holding", job=job.id)
        jobs = [site.sidejob.enqueue("outage.note") for _ in range(15)]
        wait_until(lambda: published(site) == len(jobs), message="all to be published")

        with frozen(own_rabbitmq.pid) if outage == "frozen" else nullcontext():
            if outage == "killed":
                own_rabbitmq.kill()
            elif outage == "slow":
                proxy.delay(0.3)
            began = time.monotonic()
            jobs += [site.sidejob.enqueue("outage.note") for _ in range(15)]
            assert time.monotonic() - began < 15 * 0.3 * 3 + 5
            if outage != "slow":
                gates[0].run()
            site.open("gate")
            site.record.wait_for("passed", job=gates[0].id)
        if outage == "killed":
            own_rabbitmq.start()
        elif outage == "restarted":
            own_rabbitmq.restart()

        for job in [*gates, *jobs]:
            site.wait_for(job, "completed", timeout=60)
        assert {site.job_row(job)["run_no"] for job in jobs} == {1}
        proxy.pass_through()
        site.nothing_lost()
        site.quiet()


# -- priorities ------------------------------------------------------------------------------------------------------


@pytest.mark.brokers(
    "redis", "sidejob", "amqp", only=["redis", "sidejob", "amqp"], reason="its quorum queues take no priorities"
)
def test_what_is_more_urgent_runs_first(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker
) -> None:
    with site_of(
        tmp_path, processes, record, **broker.configuration, sidejob_database_url=database_url,
        task_queue_max_priority=10, worker_prefetch_multiplier=1,
    ) as site:  # fmt: skip
        jobs = [site.sidejob.enqueue("outage.note", priority=priority) for priority in (3, 9, 0, 6)]
        wait_until(lambda: published(site) == len(jobs), message="all to be published")

        site.start_worker(concurrency=1)

        ran = [line["job"] for line in site.record.wait_for("ran", count=len(jobs), timeout=20)]
        assert ran == [jobs[place].id for place in (1, 3, 0, 2)]
        site.quiet()


# -- the rest of the suite, in small ---------------------------------------------------------------------------------


@pytest.mark.brokers("amqp", "quorum", only=["amqp", "quorum"], reason="is no RabbitMQ")
def test_the_workload_survives_the_kill_of_a_worker(scene: Scene) -> None:
    workers = [scene.worker(concurrency=2, SIDEJOB_LOST_AFTER="2", SIDEJOB_LEASE="6") for _ in range(2)]
    work = Workload.start(scene)
    scene.record.wait_for("adder")
    workers[0].kill_group()
    scene.worker(concurrency=2, SIDEJOB_LOST_AFTER="2", SIDEJOB_LEASE="6")

    scene.settle(60)
    work.judge()
