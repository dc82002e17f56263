"""`sidejob-sentinel://`: another server is the master after a failover, and it is all as before."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from celery import Celery
from kombu import Connection

from celery_sidejob.embedded.server import HOST
from celery_sidejob.hooks.broker.connection import BrokerConnection
from celery_sidejob.hooks.broker.publishing import CeleryPublisher
from celery_sidejob.model.messages import Doorbell
from celery_sidejob.transport.redis.transport import SentinelChannel
from tests.tools.recorder import Record
from tests.tools.sentinel import MASTER, Watched, watched
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.consuming import Consuming, publish
from tests.transport.redis.test_acknowledgements import Looping


@pytest.fixture
def servers() -> Iterator[Watched]:
    """A master, its replica and their sentinel."""
    with watched() as made:
        yield made


@pytest.fixture
def url(servers: Watched) -> str:
    """Their broker by two sentinels, the first of which is away."""
    ports = 1, servers.sentinel.port
    return ";".join(f"sidejob-sentinel://:{servers.password}@{HOST}:{port}/0" for port in ports)


def test_a_replica_takes_over_from_a_master_that_is_killed(
    processes: Processes, servers: Watched, url: str, record: Record
) -> None:
    options = {"master_name": MASTER, "consumer_timeout": 1}
    env = {"BROKER_URL": url, "SETTINGS": json.dumps({"broker_transport_options": options}), **record.env}
    app = Celery("client", broker=url, set_as_current=False)
    app.conf.broker_transport_options = options
    try:
        killed = processes.start_worker("tests.transport.worker_app", env=env, pool="solo")
        app.send_task("last", (60,))
        record.wait_for("begun")
        lives = processes.start_worker("tests.transport.worker_app", env=env, pool="solo")
        app.send_task("note", ("before",))
        record.wait_for("before")
        servers.wait_for_replica()

        gone = servers.master
        killed.kill_group()
        gone.kill()
        wait_until(lambda: servers.master is not gone, timeout=30, message="the replica to be the master")
        record.wait_for("begun", count=2, timeout=30)  # it was in the record of the killed, on the replica too
        assert record.of("begun")[1]["delivery_count"] == 1
        lives.kill_group()
        patient = {**options, "max_retries": 20, "interval_start": 0.2}  # a loaded sentinel takes anyone for down
        with Connection(url, transport_options=patient) as connection:
            after = Consuming(connection, "elsewhere")
            assert type(after.channel) is SentinelChannel
            asked = after.channel.pool.sentinel_manager.sentinels
            ports = {client.connection_pool.connection_kwargs["port"] for client in asked}
            assert ports == {1, servers.sentinel.port}, "all of them, before kombu turns to the next URL"
            publish(connection, "elsewhere", 1)
            assert after.take(1) == [1]
            with servers.client() as master:
                assert master.hlen(f"_sidejob.held.{after.channel.consumer.name}") == 1, "it has learnt the scripts"

        processes.start_worker("tests.transport.worker_app", env=env, pool="solo", queues="other")
        app.send_task("note", ("after",), queue="other")
        record.wait_for("after", timeout=30)
    finally:
        app.close()


@pytest.mark.few(0)
@pytest.mark.parametrize("scheme", ["sidejob-sentinel", "sentinel"])
def test_a_durable_message_is_published_to_the_master(servers: Watched, url: str, scheme: str) -> None:
    app = Celery("client", broker=url.replace("sidejob-sentinel", scheme), set_as_current=False)
    app.conf.broker_transport_options = {"master_name": MASTER}
    publisher = CeleryPublisher(app, BrokerConnection(app), lambda jobs: None)
    bells = [Doorbell(number, 1, f"task-{number}", "noop", "rung") for number in range(2)]
    for bell in bells:
        assert publisher.publish([bell]) == [bell]
        publisher.close()
    app.close()

    with servers.client() as master:
        assert master.llen("rung") == 2


def test_what_is_acknowledged_in_a_loop_is_so_at_the_master(servers: Watched, url: str) -> None:
    with Connection(url, transport_options={"master_name": MASTER}) as connection, servers.client() as master:
        consuming = Looping(connection, "looped")
        publish(connection, "looped", 1, 2)
        assert consuming.take(2) == [1, 2]
        assert master.hlen(f"_sidejob.held.{consuming.channel.consumer.name}") == 2

        for message in consuming.messages:
            message.ack()

        wait_until(
            lambda: not master.hlen(f"_sidejob.held.{consuming.channel.consumer.name}"), message="no message held"
        )
        consuming.close()


def test_without_the_name_of_a_master_it_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="master_name"), Connection(f"sidejob-sentinel://{HOST}") as connection:
        connection.connect()
