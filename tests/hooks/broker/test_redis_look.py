"""Which messages wait in a real Redis: what a look finds, what it says of the rest, and what it costs the server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Exchange, Queue

from celery_sidejob.hooks.broker import redis_look
from celery_sidejob.model.broker_view import Sight, Sought
from celery_sidejob.store.statement import Statement
from tests.tools.apps import make_app

ROWS = Statement("SELECT task_id, publication FROM {messages} ORDER BY task_id")
PREFIX = "shop:"


@pytest.fixture(params=["", PREFIX], ids=["plain", "prefixed"])
def app(database_url: str, redis_url: str, request: pytest.FixtureRequest) -> Iterator[Celery]:
    """An app with a store and a broker, to which nobody listens."""
    made = make_app(
        "shop",
        broker=redis_url,
        sidejob_database_url=database_url,
        sidejob_durable_tasks=["shop.*"],
        sidejob_lost_after=30,
        broker_transport_options={"global_keyprefix": request.param},
    )
    yield made
    made.sidejob.close()
    made.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """Redis as the test sees it."""
    with redis.Redis.from_url(redis_url) as connected:
        yield connected


def call(app: Celery, task_id: str, **options: Any) -> None:
    """Call a durable task."""
    app.send_task("shop.mail", (task_id,), task_id=task_id, **options)


def look(app: Celery) -> Sight:
    """Look for everything that is kept."""
    runtime = app.sidejob.runtime
    sight = runtime.broker.look().find([Sought.of_row(row) for row in runtime.connections.run(ROWS)])
    assert sight is not None
    return sight


def fill(client: redis.Redis, key: str, count: int, size: int = 300) -> None:
    """Put messages of others at the end that is served first."""
    with client.pipeline() as pipe:
        for number in range(count):
            pipe.rpush(
                key, json.dumps({"headers": {"id": f"other-{number}"}, "body": str(uuid.uuid4()) * (size // 36)})
            )
        pipe.execute()


def key_of(app: Celery, queue: str = "celery") -> str:
    """The list of a queue."""
    return str(app.conf.broker_transport_options["global_keyprefix"]) + queue


def test_messages_are_found_in_every_priority_s_list(app: Celery) -> None:
    for priority in (None, 0, 3, 5, 9):
        call(app, f"at-{priority}", priority=priority)
    call(app, "elsewhere", queue="other")

    assert look(app) == Sight(there={"at-None", "at-0", "at-3", "at-5", "at-9", "elsewhere"})


def test_what_was_removed_is_nowhere(app: Celery, client: redis.Redis) -> None:
    for number in range(3):
        call(app, f"call-{number}")
    call(app, "urgent", priority=9)
    (removed,) = client.lrange(key_of(app), 1, 1)
    client.lrem(key_of(app), 1, removed)
    client.delete(key_of(app, "celery\x06\x169"))

    assert look(app) == Sight(there={"call-0", "call-2"})


def test_what_was_sent_to_an_exchange_is_looked_for_in_its_queues(app: Celery) -> None:
    exchange = Exchange("news", "topic")
    queue = Queue("mails", exchange, routing_key="mail.#")
    with Connection(app.conf.broker_url, transport_options=app.conf.broker_transport_options) as connection:
        queue(connection.default_channel).declare()
    app.conf.task_queues = [queue]
    call(app, "by-queue", queue=queue)
    call(app, "by-key", exchange="news", routing_key="mail.now", exchange_type="topic")
    call(app, "to-nobody", exchange="news", routing_key="letter")

    assert look(app) == Sight(there={"by-queue", "by-key"})


@pytest.mark.timeout(60)
def test_a_pattern_in_the_broker_is_no_program(app: Celery, client: redis.Redis) -> None:
    """Neither one that takes hours, nor one that is none, keeps the others from being found."""
    queue = Queue("mails", Exchange("news", "topic"), routing_key="mail.#")
    app.conf.task_queues = [queue]
    call(app, "by-queue", queue=queue)
    call(app, "by-key", exchange="news", routing_key=f"mail.{'a' * 60}b", exchange_type="topic")
    (table,) = client.keys("*_kombu.binding.news")
    for key, pattern in (("slow", r"^mail\.(a+)+$"), ("none", "(")):
        client.sadd(table, "\x06\x16".join((key, pattern, key)))
    client.sadd(table, "no binding", "none\x06\x16either")

    assert look(app) == Sight(there={"by-queue", "by-key"})


def test_what_was_sent_to_an_exchange_that_another_process_knows_is_looked_for_too(app: Celery) -> None:
    with Connection(app.conf.broker_url, transport_options=app.conf.broker_transport_options) as connection:
        Queue("parcels", Exchange("post", "direct"), routing_key="large")(connection.default_channel).declare()
    call(app, "large", exchange="post", routing_key="large")
    call(app, "small", exchange="post", routing_key="small")

    assert look(app) == Sight(there={"large"})


def test_what_was_just_fetched_is_there_and_what_was_long_ago_is_not(app: Celery, client: redis.Redis) -> None:
    call(app, "fetched")
    call(app, "long-ago")
    with Connection(app.conf.broker_url, transport_options=app.conf.broker_transport_options) as connection:
        fetched = [connection.default_channel.basic_get("celery") for _ in range(2)]
        assert look(app) == Sight(there={"fetched", "long-ago"})

        (tag,) = [one.delivery_tag for one in fetched if one.headers["id"] == "long-ago"]
        lease = app.sidejob.settings.lease
        client.zincrby(key_of(app, "unacked_index"), -lease, tag)
        assert look(app) == Sight(there={"fetched"})

        client.delete(key_of(app, "unacked"))
        assert look(app) == Sight()


def test_behind_what_was_read_is_told_with_what_was_read_last(
    app: Celery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_look, "OF_A_LIST", 100)
    call(app, "deep")
    call(app, "urgent", priority=6)
    fill(client, key_of(app), 500)

    sight = look(app)

    assert (sight.there, sight.behind, sight.unread) == ({"urgent"}, {"deep": "celery"}, set())
    read = list(sight.last["celery"])
    assert read == [f"other-{number}" for number in range(499, 499 - len(read), -1)]
    assert 100 <= len(read) < 200


def test_lists_that_there_was_no_time_for_are_unread(
    app: Celery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_look, "OF_ALL", 100)
    for queue in ("first", "second"):
        call(app, queue, queue=queue)
        fill(client, key_of(app, queue), 200)

    sight = look(app)

    assert (set(sight.behind), sight.unread) == ({"first"}, {"second"})


def test_a_list_that_is_served_meanwhile_is_read_without_a_gap_or_not_at_all(
    app: Celery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(app, "deep")
    fill(client, key_of(app), 300)
    channel = app.sidejob.runtime.publisher._connection.open().channel
    read = channel.client.lrange
    popped_each_time = 10

    def pop_and_read(key: str, first: int, last: int) -> Any:
        client.rpop(key_of(app), popped_each_time)
        return read(key, first, last)

    monkeypatch.setattr(channel.client, "lrange", pop_and_read)
    assert look(app) == Sight(there={"deep"})

    fill(client, key_of(app), 300)
    popped_each_time = redis_look.OVERLAP + 1
    assert look(app) == Sight(unread={"deep"})


def test_what_is_no_message_or_no_list_is_no_obstacle(app: Celery, client: redis.Redis) -> None:
    call(app, "there")
    client.lpush(key_of(app), b"\xff no JSON", json.dumps(["no message"]), json.dumps({"headers": None}))
    call(app, "gone", queue="string")
    client.delete(key_of(app, "string"))
    client.set(key_of(app, "string"), "a string")

    assert look(app) == Sight(there={"there"})


def test_a_broker_that_does_not_answer_tells_nothing(app: Celery) -> None:
    call(app, "kept")
    runtime = app.sidejob.runtime
    rows = runtime.connections.run(ROWS)
    found = runtime.broker.look()
    runtime.publisher._app.conf.broker_url = "redis://127.0.0.1:1/0"
    runtime.publisher.close()

    assert found.find([Sought.of_row(row) for row in rows]) is None
    assert not runtime.broker.ready


def test_a_backlog_is_looked_into_with_few_small_commands(app: Celery, client: redis.Redis) -> None:
    call(app, "deep")
    for size in (300, 60_000):
        client.delete(key_of(app))
        fill(client, key_of(app), 100_000 if size == 300 else 400, size)
        client.config_resetstat()
        before = client.info("stats")["total_net_output_bytes"]

        sight = look(app)

        assert set(sight.behind) == {"deep"}
        calls = client.info("commandstats")
        sent = client.info("stats")["total_net_output_bytes"] - before
        assert calls["cmdstat_lrange"]["calls"] < 100
        assert sent < 6_000_000
        assert "cmdstat_hgetall" not in calls
