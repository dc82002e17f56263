"""Messages are sent to Redis without waiting for the answer."""

from __future__ import annotations

import pytest
from kombu import Connection
from kombu.transport import redis
from redis.exceptions import ResponseError

from celery_sidejob import embedded
from celery_sidejob.hooks.broker.redis_client import pushes_of


def test_a_channel_that_puts_messages_in_its_own_way_goes_on_so(own_valkey: embedded.Valkey) -> None:
    class OwnChannel(redis.Channel):
        def _put(self, queue: str, message: object, **options: object) -> None:
            super()._put(f"own.{queue}", message, **options)

    class OwnTransport(redis.Transport):
        Channel = OwnChannel

    with Connection(own_valkey.url) as usual, Connection(own_valkey.url, transport=OwnTransport) as own:
        assert pushes_of(usual.default_channel) is not None
        assert pushes_of(own.default_channel) is None
        own.Producer().publish("one", routing_key="queue")
        with own.default_channel.conn_or_acquire() as client:
            assert (client.llen("own.queue"), client.llen("queue")) == (1, 0)


def test_messages_are_pushed_in_order_and_a_refusal_hides_no_answer(own_valkey: embedded.Valkey) -> None:
    with Connection(own_valkey.url) as connection, connection.default_channel.conn_or_acquire() as client:
        pushes = pushes_of(connection.default_channel)
        assert pushes is not None
        client.set("taken", "no list")

        pushes.push([("one", "a"), ("one", "b"), ("taken", "c"), ("two", "d"), ("one", "e")])
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            pushes.hear()

        assert (client.lrange("one", 0, -1), client.lrange("two", 0, -1)) == ([b"e", b"b", b"a"], [b"d"])
        pushes.push([("two", "f")])
        pushes.hear()
        assert client.lrange("two", 0, -1) == [b"f", b"d"]
