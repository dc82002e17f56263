"""What leaves a record: only with the current token, and what goes back goes to the head of its list, oldest first."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import pytest
import redis
from kombu import Exchange, Queue

from celery_sidejob.transport import message_buried, message_refused, messages_recovered
from celery_sidejob.transport.redis.records import PAGE, Records
from tests.tools.waiting import wait_until
from tests.transport.conftest import Connect
from tests.transport.consuming import Consuming, publish, waiting

SHORT = {"consumer_timeout": 0.5}


def listed(server: redis.Redis, key: str) -> list[Any]:
    """What is in a list, the next to be served first: bodies as they were published."""
    return [body_of(text) for text in waiting(server, key)]


def body_of(text: bytes | str) -> Any:
    """What was published, from a message as it is in Redis."""
    return json.loads(base64.b64decode(json.loads(text)["body"]))


def left_behind(server: redis.Redis) -> list[str]:
    """Keys of ours that say that somebody is a consumer or holds something."""
    return [
        key.decode()
        for key in server.scan_iter("*_sidejob.*")
        if not any(one in key for one in (b".bell.", b".dead", b".era"))
    ]


def dead(connect: Connect, count: int, queue: str = "queue", **options: Any) -> Consuming:
    """A consumer that has taken so many messages and fallen silent."""
    consuming = Consuming(connect(**SHORT, **options), queue, prefetch=count)
    consuming.take(count)
    consuming.fall_silent()
    return consuming


def recover(connect: Connect, **options: Any) -> None:
    """Let somebody who serves none of the queues recover all there is."""
    consuming = Consuming(connect(**SHORT, **options), "elsewhere", prefetch=1)
    consuming.drain(0.01)
    heart = consuming.channel.connection._heart
    server = consuming.channel._client_of_scripts

    def only_this_one() -> bool:
        heart.run_once()
        return server.zrange(consuming.channel.keys.consumers, 0, -1) == [consuming.channel.consumer.name.encode()]

    wait_until(only_this_one, message="the dead to be found")
    consuming.close()


def test_a_requeued_message_is_served_next(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0, 1, 2)
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.take(1)
    consuming.messages[0].requeue()
    assert listed(server, "queue") == [0, 1, 2], "kombu's own puts it last"
    assert consuming.take(1) == [0]
    assert consuming.messages[1].headers["redelivered"] is True
    assert consuming.messages[1].delivery_info["redelivered"] is True
    assert consuming.messages[1].properties["delivery_count"] == 1, "it came back"
    consuming.messages[1].reject()
    assert consuming.take(1) == [1]


def test_who_leaves_gives_back_all_in_order_to_each_priority(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0, 1, 2)
    publish(connect(), "queue", 10, 11, 12, priority=6)
    consuming = Consuming(connect(), "queue", prefetch=5)
    consuming.take(5)
    publish(connect(), "queue", 3)
    consuming.close()
    assert listed(server, "queue") == [0, 1, 2, 3]
    assert listed(server, "queue\x06\x166") == [10, 11, 12]
    assert left_behind(server) == []


def test_a_dead_consumer_s_messages_are_recovered_by_any_other(connect: Connect, server: redis.Redis) -> None:
    told: list[dict[str, Any]] = []
    messages_recovered.connect(fails := lambda **facts: 1 / 0)
    messages_recovered.connect(receiver := lambda **facts: told.append(facts))
    try:
        for name in "abcd":
            publish(connect(), "queue", name, headers={"id": f"task-{name}"})
        consuming = dead(connect, 3)
        publish(connect(), "queue", "e")
        recover(connect)
    finally:
        messages_recovered.disconnect(fails)
        messages_recovered.disconnect(receiver)
    assert listed(server, "queue") == ["a", "b", "c", "d", "e"]
    assert left_behind(server) == []
    consumer, _, _ = consuming.messages[0].delivery_tag.rpartition("#")
    assert told == [{"consumer": consumer, "queue": "queue", "task_ids": ["task-a", "task-b", "task-c"]}]
    again = Consuming(connect(), "queue", prefetch=1)
    again.take(1)
    assert again.messages[0].properties["delivery_count"] == 1


def test_more_than_a_page_goes_back_in_order(connect: Connect, server: redis.Redis) -> None:
    numbers = list(range(PAGE + 30))
    publish(connect(), "queue", *numbers)
    dead(connect, len(numbers))
    recover(connect)
    assert listed(server, "queue") == numbers


def test_large_messages_go_back_in_several_steps(
    connect: Connect, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.transport.redis.records.PAGE_BYTES", 1000)
    publish(connect(), "queue", *range(10))
    dead(connect, 10)
    recover(connect)
    assert listed(server, "queue") == list(range(10))
    assert left_behind(server) == []


def test_who_beats_is_not_recovered(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0)
    alive = Consuming(connect(), "queue", prefetch=1)
    alive.take(1)
    consumer = alive.channel.consumer.name
    assert consumer is not None
    alive.channel.records.recover(consumer)
    assert server.hlen(f"_sidejob.held.{consumer}") == 1


@pytest.mark.parametrize("verb", ["ack", "reject", "requeue"])
def test_a_zombie_changes_nothing_of_the_new_owner_s(connect: Connect, server: redis.Redis, verb: str) -> None:
    told: list[dict[str, Any]] = []
    publish(connect(), "queue", 0)
    zombie = dead(connect, 1)
    recover(connect)
    owner = Consuming(connect(), "queue", prefetch=1)
    owner.take(1)
    before = {key: server.hgetall(key) for key in server.scan_iter("_sidejob.held.*")}

    message_refused.connect(receiver := lambda **facts: told.append(facts))
    try:
        getattr(zombie.messages[0], verb)()
    finally:
        message_refused.disconnect(receiver)

    assert {key: server.hgetall(key) for key in server.scan_iter("_sidejob.held.*")} == before
    assert server.llen("queue") == 0
    tag = zombie.messages[0].delivery_tag
    assert told == [{"verb": verb, "consumer": tag.rpartition("#")[0], "delivery_tag": tag}]
    owner.messages[0].ack()
    owner.close()
    zombie.close()
    assert left_behind(server) == []


@pytest.mark.parametrize(
    "text", [b"{", b'{"headers": {"a": {"__type__": "decimal", "__value__": "x"}}}', b"[" * 100_000]
)
def test_what_cannot_be_read_holds_back_nothing(connect: Connect, server: redis.Redis, text: bytes) -> None:
    publish(connect(), "queue", 0)
    consuming = dead(connect, 1)
    held = f"_sidejob.held.{consuming.channel.consumer.name}"
    server.hset(held, "1.9", b"5:queue" + text)
    recover(connect)
    assert server.hlen(held) == 0
    assert waiting(server, "queue")[-1] == text, "it was taken last, and whoever fetches it says what is wrong with it"
    assert server.llen("queue") == 2


def test_a_zombie_fetches_on_with_new_tokens(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", 0, 1)
    zombie = dead(connect, 1)
    recover(connect)
    zombie.messages[0].ack()  # refused
    assert zombie.take(1) == [0], "it is given its own again"
    zombie.messages[1].ack()
    assert zombie.take(1) == [1]


def test_with_how_many_a_message_dies_is_counted_and_limited(connect: Connect, server: redis.Redis) -> None:
    told: list[dict[str, Any]] = []
    publish(connect(), "queue", "poison", headers={"id": "task-1"})
    message_buried.connect(receiver := lambda **facts: told.append(facts))
    try:
        for _ in range(2):
            dead(connect, 1, delivery_limit=2)
            recover(connect, delivery_limit=2)
    finally:
        message_buried.disconnect(receiver)
    assert server.llen("queue") == 0
    (buried,) = map(json.loads, server.lrange("_sidejob.dead", 0, -1))
    assert (buried["queue"], buried["task_id"]) == ("queue", "task-1")
    assert body_of(buried["message"]) == "poison", "as it was published"
    assert [(one["queue"], one["task_id"]) for one in told] == [("queue", "task-1")]
    assert "2 times" in told[0]["reason"]
    assert left_behind(server) == []


def test_without_a_limit_it_is_recovered_for_ever(connect: Connect, server: redis.Redis) -> None:
    publish(connect(), "queue", "poison")
    for _ in range(3):
        dead(connect, 1, delivery_limit=None)
        recover(connect, delivery_limit=None)
    assert listed(server, "queue") == ["poison"]


def test_several_recover_many_at_once_and_each_message_once(
    connect: Connect, server: redis.Redis, redis_url: str
) -> None:
    queues = [f"queue{number}" for number in range(10)]
    for queue in queues:
        publish(connect(), queue, *range(20))
        dead(connect, 20, queue)
    consumers = [name.decode() for name in server.zrange("_sidejob.consumers", 0, -1)]
    wait_until(
        lambda: server.zcount("_sidejob.consumers", f"({_now_ms(server)}", "+inf") == 0, message="all to be dead"
    )
    keys = connect().default_channel.keys

    def recover_all() -> None:
        with redis.Redis.from_url(redis_url) as client:
            for consumer in consumers:
                Records(client, keys, delivery_limit=None).recover(consumer)

    recoverers = [threading.Thread(target=recover_all) for _ in range(4)]
    for recoverer in recoverers:
        recoverer.start()
    publish(connect(), "queue0", 20)
    for recoverer in recoverers:
        recoverer.join()
    assert listed(server, "queue0") == list(range(21))
    for queue in queues[1:]:
        assert listed(server, queue) == list(range(20))
    assert left_behind(server) == []


def test_what_cannot_go_back_stays_where_it_is(
    connect: Connect, server: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    publish(connect(), "queue", 0)
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.take(1)
    server.set("queue", "no list")
    consuming.close()
    assert "not a list" in caplog.text
    server.delete("queue")
    (consumer,) = (name.decode() for name in server.zrange("_sidejob.consumers", 0, -1))
    server.zadd("_sidejob.consumers", {consumer: 1})
    recover(connect)
    assert listed(server, "queue") == [0]


def test_what_was_routed_goes_back_without_its_binding(connect: Connect, server: redis.Redis) -> None:
    exchange = Exchange("log", type="topic")
    consuming = Consuming(connect(), Queue("errors", exchange, routing_key="log.*.error"), prefetch=1)
    with connect().Producer() as producer:
        producer.publish(0, exchange=exchange, routing_key="log.shop.error", serializer="json", declare=[exchange])
    consuming.take(1)
    server.delete("_kombu.binding.log")
    consuming.close()
    assert listed(server, "errors") == [0], "kombu's own deletes it"


@pytest.mark.timeout(60)
def test_a_pattern_in_the_broker_is_no_program(connect: Connect, server: redis.Redis) -> None:
    exchange = Exchange("log", type="topic")
    consuming = Consuming(connect(), Queue("errors", exchange, routing_key="log.*.error"), prefetch=1)
    for key, pattern in (("slow", r"^log\.(x+)+$"), ("none", "(")):
        server.sadd("_kombu.binding.log", "\x06\x16".join((key, pattern, key)))
    with connect().Producer() as producer:
        key = f"log.{'x' * 60}.error"
        producer.publish(0, exchange=exchange, routing_key=key, serializer="json", declare=[exchange])
    assert consuming.take(1) == [0]


def _now_ms(server: redis.Redis) -> int:
    seconds, microseconds = server.time()
    return int(seconds * 1000 + microseconds // 1000)
