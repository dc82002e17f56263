"""What kombu's Redis transport does, ours do too: each test runs on all of them, or on those of Redis."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
import redis
from celery import Celery
from kombu import Connection, Exchange, Queue
from kombu.transport.redis import Transport as StockTransport

from tests.tools.brokers import in_postgres
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.conftest import Connect, ours, unfinished
from tests.transport.consuming import Consuming, publish


@pytest.fixture(params=["redis", "sidejob", "sidejobpg"])
def url(request: pytest.FixtureRequest, redis_url: str) -> str:
    """The URL of an empty broker of each kind."""
    if request.param == "sidejobpg":
        return in_postgres(request.getfixturevalue("database_url"))
    return redis_url if request.param == "redis" else ours(redis_url)


on_redis = pytest.mark.parametrize("url", ["redis", "sidejob"], indirect=True)
"""What is about Redis, or about an order of priorities and queues that only Redis has."""


@dataclass(frozen=True)
class Look:
    """How many messages there are of which kind, as the server sees it."""

    waiting: Callable[[str], int]
    held: Callable[[], int]


@pytest.fixture
def look(url: str, server: redis.Redis, request: pytest.FixtureRequest) -> Iterator[Look]:
    """A look into the broker of `url`."""
    if not url.startswith("sidejobpg"):
        yield Look(lambda queue: server.llen(queue) + server.llen(f"shop:{queue}"), lambda: unfinished(server))
        return
    with psycopg.connect(request.getfixturevalue("database_url"), autocommit=True) as connection:

        def count(condition: str) -> int:
            found = connection.execute(f"SELECT count(*) FROM sidejob.broker_messages WHERE {condition}").fetchone()
            assert found is not None
            return int(found[0])

        yield Look(lambda queue: count(f"queue = '{queue}' AND holder IS NULL"), lambda: count("holder IS NOT NULL"))


@pytest.fixture
def client() -> Iterator[Callable[..., Celery]]:
    """Makes apps that send to a broker, with settings as keywords; they are closed after the test."""
    with ExitStack() as stack:

        def made(url: str, **settings: Any) -> Celery:
            app = stack.enter_context(Celery("client", broker=url, set_as_current=False))
            app.conf.update(settings)
            # Kombu keeps connections beyond their app. On one that has rested for minutes it takes the BRPOP of an
            # earlier ping for a dead server's, and the answers to the next one are lost.
            stack.callback(lambda: app.pool.resize(app.pool.limit, reset=True))
            return app

        yield made


@on_redis
@pytest.mark.parametrize("prefetch", [0, 100], ids=["one by one", "in batches"])
def test_queues_take_turns_within_a_priority(connect: Connect, url: str, prefetch: int) -> None:
    for priority in (6, 0):
        publish(connect(url), "b", f"b{priority}", f"b{priority}'", priority=priority)
        publish(connect(url), "a", f"a{priority}", f"a{priority}'", f"a{priority}''", priority=priority)
    publish(connect(url), "c", "c0", priority=2)
    consuming = Consuming(connect(url), "a", "b", "c", prefetch=prefetch)
    assert consuming.take(11) == ["a0", "b0", "c0", "a0'", "b0'", "a0''", "b6", "a6", "b6'", "a6'", "a6''"]


@on_redis
@pytest.mark.parametrize("strategy", ["priority", "sorted"])
@pytest.mark.parametrize("prefetch", [0, 100], ids=["one by one", "in batches"])
def test_queues_in_a_fixed_order(connect: Connect, url: str, strategy: str, prefetch: int) -> None:
    publish(connect(url), "z", "z0", "z1")
    publish(connect(url), "a", "a0", "a1")
    publish(connect(url), "a", "first", "second", priority=0)
    publish(connect(url), "z", "late", priority=9)
    consuming = Consuming(connect(url, queue_order_strategy=strategy), "z", "a", prefetch=prefetch)
    of_a = ["a0", "a1", "first", "second"]
    assert consuming.take(7) == (["z0", "z1", *of_a, "late"] if strategy == "priority" else [*of_a, "z0", "z1", "late"])


def test_exchanges_route(connect: Connect, url: str) -> None:
    direct, topic = Exchange("direct", type="direct"), Exchange("topic", type="topic")
    queues = [
        Queue("orders", direct, routing_key="orders"), Queue("all", topic, routing_key="log.#"),
        Queue("errors", topic, routing_key="log.*.error"),
    ]  # fmt: skip
    consuming = Consuming(connect(url), *queues)
    with connect(url).Producer() as producer:
        for exchange, key in ((direct, "orders"), (topic, "log.shop.error"), (topic, "log.shop.info")):
            producer.publish(key, exchange=exchange, routing_key=key, declare=[exchange])
    consuming.take(4)
    found = sorted((message.delivery_info["routing_key"], message.payload) for message in consuming.messages)
    assert [key for key, _ in found] == ["log.shop.error", "log.shop.error", "log.shop.info", "orders"]
    for message in consuming.messages:
        message.ack()
    consuming.drain()
    assert len(consuming.messages) == 4


def test_fanout_reaches_everybody(connect: Connect, url: str) -> None:
    exchange = Exchange("news", type="fanout")
    everybody = [Consuming(connect(url), Queue(f"news{number}", exchange), no_ack=True) for number in range(2)]
    for one in everybody:
        one.drain(0.05)
    with connect(url).Producer() as producer:
        producer.publish("extra", exchange=exchange, declare=[exchange])
    assert [one.take(1) for one in everybody] == [["extra"], ["extra"]]


def test_a_prefetch_is_a_limit(connect: Connect, url: str) -> None:
    publish(connect(url), "queue", *range(5))
    consuming = Consuming(connect(url), "queue", prefetch=2)
    consuming.take(2)
    consuming.drain()
    assert consuming.bodies == [0, 1]
    consuming.messages[0].ack()
    consuming.messages[1].reject()
    assert consuming.take(2) == [2, 3]


def test_queues_are_declared_measured_purged_and_deleted(connect: Connect, url: str) -> None:
    channel = connect(url).default_channel
    queue = Queue("queue", Exchange("exchange"), routing_key="queue")(channel)
    queue.declare()
    publish(connect(url), "queue", 1, 2)
    publish(connect(url), "queue", 3, priority=9)
    assert queue.queue_declare(passive=True).message_count == 3
    assert queue.purge() == 3
    assert queue.get() is None
    publish(connect(url), "queue", 1)
    queue.delete()
    with pytest.raises(channel.connection.channel_errors):
        queue.queue_declare(passive=True)


@on_redis
def test_a_queue_that_nobody_uses_expires(connect: Connect, url: str, server: redis.Redis) -> None:
    queue = Queue("queue", routing_key="queue", expires=60)
    with connect(url).Producer() as producer:
        producer.publish(1, routing_key="queue", declare=[queue])
        producer.publish(2, routing_key="queue", declare=[queue], priority=9)
    for key in ("queue", "queue\x06\x169"):
        assert 50_000 < server.pttl(key) <= 60_000


def test_a_batch_is_published_as_a_whole(connect: Connect, url: str) -> None:
    connection = connect(url, global_keyprefix="shop:")
    with connection.Producer() as producer, producer.batch():
        for number in range(3):
            producer.publish(number, routing_key="queue")
        producer.publish("urgent", routing_key="other", priority=3)
        assert connection.default_channel._size("queue") == 0, "not before its end"
    assert Consuming(connect(url, global_keyprefix="shop:"), "queue").take(3) == [0, 1, 2]
    assert Consuming(connect(url, global_keyprefix="shop:"), "other").take(1) == ["urgent"]


def test_a_simple_queue(connect: Connect, url: str) -> None:
    queue = connect(url).SimpleQueue("simple")
    queue.put({"a": 1})
    message = queue.get(timeout=5)
    assert message.payload == {"a": 1}
    message.ack()
    with pytest.raises(queue.Empty):
        queue.get_nowait()
    queue.close()


def test_the_next_of_several_urls_is_of_the_same_kind(url: str) -> None:
    nowhere = f"{url.split(':')[0]}://127.0.0.1:1/0"
    with Connection(f"{nowhere};{url}") as connection:
        connection.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
        publish(connection, "queue", 1)
        assert Consuming(connection, "queue").take(1) == [1]
        assert (type(connection.transport) is StockTransport) == url.startswith("redis:")


@pytest.mark.parametrize("direction", ["there", "back"])
def test_both_kinds_share_their_queues(connect: Connect, redis_url: str, direction: str) -> None:
    urls = redis_url, ours(redis_url)
    producing, consumed = urls if direction == "there" else reversed(urls)
    prefixed = {"global_keyprefix": "shop:", "consumer_timeout": 0.6}
    consuming = Consuming(connect(consumed, **prefixed), "queue", prefetch=1)
    consuming.drain(0.05)
    publish(connect(producing, **prefixed), "queue", "a", "b")
    publish(connect(producing, **prefixed), "queue", "c", priority=9)
    got = []
    for _ in range(3):
        got += consuming.take(1)
        consuming.messages[-1].ack()
    assert got == ["a", "b", "c"]


def test_what_a_killed_worker_of_kombu_s_had_is_restored_by_ours(connect: Connect, redis_url: str) -> None:
    options = {"visibility_timeout": 0, "unacked_restore_throttle": 1}
    publish(connect(redis_url), "queue", 1)
    stock = Consuming(connect(redis_url), "queue")
    stock.take(1)
    ours_now = Consuming(connect(**options), "queue")
    assert ours_now.take(1) == [1]
    stock.channel.do_restore = False  # it was killed


def test_a_worker_runs_tasks_and_hears_commands(
    processes: Processes, url: str, record: Record, client: Callable[..., Celery], server: redis.Redis, look: Look
) -> None:
    settings = {"broker_transport_options": {"global_keyprefix": "shop:"}}
    env = {"BROKER_URL": url, "SETTINGS": json.dumps(settings), **record.env}
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="prefork", concurrency=2)
    app = client(url, **settings)
    app.send_task("early", (60,))
    record.wait_for("early")
    wait_until(lambda: look.held() == 0, message="it to be acknowledged, as it has begun")
    app.send_task("note", ("now",))
    app.send_task("note", ("soon",), countdown=0.3)
    app.send_task("rejected")
    for event in ("now", "soon"):
        record.wait_for(event)
    record.wait_for("rejected", count=2)
    assert [list(answer) for answer in app.control.ping(timeout=5, limit=1)] == [[worker.nodename]]
    app.control.add_consumer("added", reply=True, timeout=5, limit=1)
    app.send_task("note", ("added",), queue="added")
    record.wait_for("added")
    app.control.cancel_consumer("celery", reply=True, timeout=5, limit=1)
    app.send_task("note", ("never",))
    app.send_task("note", ("last",), queue="added")
    record.wait_for("last")
    wait_until(lambda: look.held() == 0, message="all to be acknowledged")
    assert look.waiting("celery") == 1
    assert [key for key in server.scan_iter() if not key.startswith(b"shop:")] == []
    worker.kill_group()
    assert record.of("never") == []


@pytest.mark.slow
def test_workers_meet_and_are_watched(
    processes: Processes, url: str, record: Record, client: Callable[..., Celery]
) -> None:
    app = client(url)
    seen: list[str] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": lambda event: seen.append(event["type"])})
        with receiver.consumer_context() as (listening, *_):

            def watched(kind: str) -> bool:
                with suppress(TimeoutError):
                    listening.drain_events(timeout=0.1)
                return kind in seen

            watched("")  # subscribes; what comes from now on is kept
            workers = [
                processes.start(
                    [sys.executable, "-m", "celery", "-A", "tests.transport.worker_app", "worker", "-E", "-n",
                     f"{name}@test", "--pool=gevent", "--loglevel=DEBUG"],
                    env={"BROKER_URL": url, **record.env},
                )
                for name in ("first", "second")
            ]  # fmt: skip
            for worker in workers:
                worker.wait_for_log("ready.", 30)
            for worker, other in zip(workers, ("second", "first"), strict=True):
                worker.wait_for_log(f"{other}@test joined the party", 30)
            app.send_task("note", ("watched",))
            wait_until(lambda: watched("task-succeeded"), message="it to be announced")
    assert {"worker-online", "task-received", "task-started"} <= set(seen)


@on_redis
def test_a_worker_that_prefetches_nothing_and_is_given_time_to_stop(
    processes: Processes, url: str, record: Record, client: Callable[..., Celery], server: redis.Redis
) -> None:
    settings = {"worker_disable_prefetch": True, "worker_soft_shutdown_timeout": 1.5}
    env = {"BROKER_URL": url, "SETTINGS": json.dumps(settings), **record.env}
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="prefork", concurrency=2)
    app = client(url)
    for seconds in (60, 1):
        app.send_task("last", (seconds,))
    record.wait_for("begun", count=2)
    for _ in range(2):
        app.send_task("last", (60,))
    assert app.control.ping(timeout=5, limit=1), "it looks at what there is meanwhile"
    assert (server.llen("celery"), unfinished(server)) == (2, 2)
    worker.send_signal(signal.SIGQUIT)
    worker.wait(20)
    record.wait_for("ended")
    assert (server.llen("celery"), unfinished(server)) == (3, 0)
