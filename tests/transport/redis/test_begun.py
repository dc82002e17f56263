"""What came back from a consumer that had begun it is counted, delivered alone, and given up; nothing else is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from celery import Celery
from celery.worker import state
from kombu import Queue

from celery_sidejob.hooks.messages import doorbell
from celery_sidejob.hooks.worker.delivered import return_to_head
from celery_sidejob.model import durable
from celery_sidejob.transport import quarantine
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.conftest import Connect
from tests.transport.consuming import Consuming, publish, waiting
from tests.transport.redis.test_dead import left
from tests.transport.redis.test_records import SHORT, body_of, dead, left_behind, listed, recover


class Request:
    """A request of a worker of Celery's."""

    def __init__(self, message: Any) -> None:
        self.message = message


@pytest.fixture
def requests() -> Iterator[list[Request]]:
    """Keeps requests alive, which Celery's worker state holds weakly."""
    kept: list[Request] = []
    yield kept
    for request in kept:
        state.reserved_requests.discard(request)
        state.active_requests.discard(request)


def counts(server: redis.Redis, key: str = "queue") -> dict[Any, int]:
    """How often each message in a list has come back from somebody who had begun it."""
    return {body_of(text): json.loads(text)["properties"].get("delivery_count", 0) for text in waiting(server, key)}


@pytest.fixture
def client(broker_url: str) -> Iterator[Celery]:
    """A plain app that sends tasks."""
    app = Celery("client", broker=broker_url, set_as_current=False)
    yield app
    app.close()


@pytest.mark.few(0)
def test_what_kills_its_pool_process_is_given_up_and_what_is_behind_it_runs(
    processes: Processes, broker_url: str, record: Record, client: Celery, server: redis.Redis
) -> None:
    options = {"broker_transport_options": {"consumer_timeout": 1, "delivery_limit": 3}}
    env = {"BROKER_URL": broker_url, "SETTINGS": json.dumps(options), **record.env}
    processes.start_worker("tests.transport.worker_app", env=env, pool="prefork", concurrency=1)
    killer = client.send_task("kill")
    client.send_task("note", ("behind it",))
    record.wait_for("behind it", timeout=40)
    # Two deaths are still to come, each of which Celery notices after five seconds.
    wait_until(lambda: left(server) == [killer.id], timeout=30, message="it to be in the dead list")
    assert len(record.of("kill")) == 3


def test_what_a_worker_gives_back_before_it_begins_goes_to_the_head_and_is_not_counted(
    connect: Connect, server: redis.Redis
) -> None:  # fmt: skip
    publish(connect(), "queue", 0, 1, 2)
    consuming = Consuming(connect(), "queue", prefetch=2)
    consuming.take(2)
    consuming.cancel()

    for message in reversed(consuming.messages):
        return_to_head(message, ())

    assert counts(server) == {0: 0, 1: 0, 2: 0}
    assert Consuming(connect(), "queue", prefetch=3).take(3) == [0, 1, 2]


def test_what_has_its_worker_leave_is_counted(
    processes: Processes, broker_url: str, record: Record, client: Celery, server: redis.Redis
) -> None:
    env = {"BROKER_URL": broker_url, **record.env}
    client.send_task("leave")
    client.send_task("note", ("far",), countdown=3600)
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="solo", ready_timeout=None)
    record.wait_for("leave", timeout=30)
    worker.wait(20)
    texts = [json.loads(text) for text in waiting(server, "celery")]
    found = {text["headers"]["task"]: text["properties"].get("delivery_count") for text in texts}
    assert found == {"leave": 1, "note": None}


def test_who_is_in_the_company_of_a_killer_is_not_given_up_with_it(connect: Connect, server: redis.Redis) -> None:
    innocents = [f"innocent{number}" for number in range(6)]
    publish(connect(), "queue", *innocents[:3], "killer", *innocents[3:])
    done: list[str] = []
    for _ in range(4):
        consuming = Consuming(connect(**SHORT, delivery_limit=3), "queue", prefetch=7)
        while True:
            consuming.drain(0.3)
            held = [message for message in consuming.messages if not message.acknowledged]
            if any(message.payload == "killer" for message in held):
                break
            for message in held:
                message.ack()
                done.append(message.payload)
            if len(done) == 6 and left(server):
                break
        consuming.fall_silent()
        recover(connect, delivery_limit=3)
    assert sorted(done) == innocents
    assert [body_of(json.loads(text)["message"]) for text in server.lrange("_sidejob.dead", 0, -1)] == ["killer"]


def test_what_a_worker_has_not_begun_is_not_counted(
    connect: Connect, server: redis.Redis, requests: list[Request]
) -> None:
    publish(connect(), "queue", "runs", "waits")
    consuming = Consuming(connect(**SHORT), "queue", prefetch=2)
    consuming.take(2)
    requests += map(Request, consuming.messages)
    state.reserved_requests.update(requests)
    state.active_requests.add(requests[0])
    heart = consuming.channel.connection._heart
    heart.run_once()
    assert server.scard(f"_sidejob.waiting.{consuming.channel.consumer.name}") == 1
    consuming.fall_silent()
    recover(connect)
    assert counts(server) == {"runs": 1, "waits": 0}
    assert left_behind(server) == []


def test_what_begins_waits_no_more(connect: Connect, server: redis.Redis, requests: list[Request]) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.take(1)
    heart, key = consuming.channel.connection._heart, f"_sidejob.waiting.{consuming.channel.consumer.name}"
    requests.append(Request(consuming.messages[0]))
    state.reserved_requests.add(requests[0])
    heart.run_once()
    assert server.scard(key) == 1
    state.active_requests.add(requests[0])
    heart.run_once()
    assert server.scard(key) == 0
    state.active_requests.discard(requests[0])
    heart.run_once()
    assert server.scard(key) == 1
    consuming.close()
    assert counts(server) == {0: 0}
    assert left_behind(server) == []


def test_what_is_for_later_has_not_begun(connect: Connect, server: redis.Redis) -> None:
    now = datetime.now(UTC)
    for name, eta in (("later", now + timedelta(hours=1)), ("due", now - timedelta(hours=1)), ("odd", "tomorrow")):
        publish(connect(), "queue", name, headers={"eta": eta if isinstance(eta, str) else eta.isoformat()})
    dead(connect, 3)
    recover(connect)
    assert counts(server) == {"later": 0, "due": 1, "odd": 1}


def test_who_leaves_counts_what_it_has_begun(connect: Connect, server: redis.Redis, requests: list[Request]) -> None:
    publish(connect(), "queue", "runs", "waits")
    consuming = Consuming(connect(), "queue", prefetch=2)
    consuming.take(2)
    requests.append(Request(consuming.messages[0]))
    state.active_requests.add(requests[0])
    consuming.close()
    assert counts(server) == {"runs": 1, "waits": 0}


def test_a_suspect_is_delivered_alone_for_a_while_and_a_grave_one_until_it_is_done(
    connect: Connect, server: redis.Redis
) -> None:
    publish(connect(), "queue", "suspect", "other", "another")
    dead(connect, 1)
    recover(connect)
    assert list(counts(server).values()) == [1, 0, 0]
    second = Consuming(connect(consumer_timeout=1.5), "queue", prefetch=3)
    assert second.take(1) == ["suspect"]
    assert not second.drain_once(0.5)
    assert second.take(2) == ["other", "another"]
    second.close()

    grave = Consuming(connect(**SHORT, delivery_limit=2), "queue", prefetch=3)
    assert grave.take(1) == ["suspect"]
    assert not grave.drain_once(1.2)
    grave.messages[0].ack()
    assert grave.take(2) == ["other", "another"]
    grave.close()

    publish(connect(), "queue", "fresh")
    server.rpush("queue", server.lpop("queue"))
    assert Consuming(connect(), "queue", prefetch=3).take(3) == ["fresh", "other", "another"]


def test_a_suspect_has_a_fetch_of_its_own(connect: Connect, server: redis.Redis) -> None:
    names = ["first", "suspect", "fresh", "another", "second suspect", "last"]
    publish(connect(), "queue", *names)
    for place, text in enumerate(server.lrange("queue", 0, -1)):
        if "suspect" in body_of(text):
            message = json.loads(text)
            message["properties"][quarantine.SUSPECT] = True
            server.lset("queue", place, json.dumps(message))
    consuming = Consuming(connect(**SHORT), "queue", prefetch=6)
    assert consuming.take(6) == names
    fetches = [message.delivery_tag.rpartition("#")[2].partition(".")[0] for message in consuming.messages]
    together = {name: fetches.count(fetch) for name, fetch in zip(names, fetches, strict=True)}
    assert together == {"first": 1, "suspect": 1, "fresh": 2, "another": 2, "second suspect": 1, "last": 1}


def test_what_was_sent_back_is_counted_in_order_and_no_suspect(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0, 1, 2, 3)
    consuming = Consuming(connect(), "queue", prefetch=3)
    consuming.take(3)
    for message in list(consuming.messages):
        message.requeue()
    assert list(counts(server).items()) == [(0, 1), (1, 1), (2, 1), (3, 0)]
    assert consuming.take(3, timeout=2) == [0, 1, 2]
    consuming.messages[3].requeue()
    assert listed(server, "queue") == [0, 3]
    consuming.close()
    assert listed(server, "queue") == [1, 2, 0, 3]


def test_a_list_that_expires_does_so_after_something_was_sent_back(connect: Connect, server: redis.Redis) -> None:
    queue = Queue("queue", routing_key="queue", expires=100)
    with connect() as connection:
        queue(connection).declare()
        publish(connection, "queue", 0, 1)
        publish(connection, "queue", 2)
    consuming = Consuming(connect(), queue, prefetch=2)
    consuming.take(2)
    assert server.ttl("queue") > 0
    for message in list(consuming.messages):
        message.requeue()
    assert listed(server, "queue") == [0, 1, 2]
    assert server.ttl("queue") > 0


def test_what_has_a_row_may_be_sent_back_as_often_as_its_store_is_away(connect: Connect, server: redis.Redis) -> None:
    assert set(quarantine.ROWS) == {doorbell.HEADER, durable.HEADER}
    for header in quarantine.ROWS:
        publish(connect(), header, 0, headers={header: {"v": 1}})
        consuming = Consuming(connect(delivery_limit=1), header, prefetch=1)
        consuming.take(1)
        consuming.messages[0].requeue()
        assert counts(server, header) == {0: 0}
        consuming.close()


@pytest.mark.parametrize("count", ["x", [1], {}, -1, 2**70])
def test_a_count_that_is_none_breaks_nothing(connect: Connect, server: redis.Redis, count: Any) -> None:
    publish(connect(), "queue", 0)
    (text,) = waiting(server, "queue")
    message = json.loads(text)
    message["properties"]["delivery_count"] = count
    server.lset("queue", 0, json.dumps(message))
    consuming = Consuming(connect(), "queue", prefetch=1)
    assert consuming.take(1) == [0]
    consuming.close()
    assert listed(server, "queue") == [0]
