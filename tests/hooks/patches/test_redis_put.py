"""What is published on kombu's Redis channel ends in its method `_put`."""

from __future__ import annotations

import inspect
from typing import Any

from kombu import Connection, Queue
from kombu.transport.redis import Channel

from celery_sidejob import embedded
from celery_sidejob.hooks.patches.redis_put import can_be_replaced, replace_put


def test_what_is_published_is_put_by_ours_or_as_before(own_valkey: embedded.Valkey) -> None:
    assert list(inspect.signature(Channel._put).parameters) == ["self", "queue", "message", "kwargs"]
    put: list[tuple[str, Any]] = []
    with Connection(own_valkey.url) as connection:
        channel = connection.default_channel
        assert can_be_replaced(channel)
        before = replace_put(channel, lambda queue, message, **options: put.append((queue, message)))

        connection.Producer().publish({"a": 1}, routing_key="ours", declare=[Queue("ours")], headers={"id": "one"})

        [(queue, message)] = put
        assert (queue, message["headers"]["id"]) == ("ours", "one")
        key = channel._q_for_pri(queue, channel._get_message_priority(message, reverse=False))
        with channel.conn_or_acquire() as client:
            assert client.llen(key) == 0
            before(queue, message)
            assert client.llen(key) == 1


def test_that_of_another_broker_is_left_alone() -> None:
    with Connection("memory://") as connection:
        assert not can_be_replaced(connection.default_channel)
