"""kombu's Redis channel makes each of its clients by `_create_client`; one does as long as its pool is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery
from kombu import Connection, Consumer, Producer, Queue
from kombu.common import ignore_errors

from celery_sidejob import embedded
from celery_sidejob.hooks.patches.connections import keep_client


def test_a_channel_makes_one_client_for_each_pool(own_valkey: embedded.Valkey) -> None:
    with Connection(own_valkey.url) as connection:
        channel = connection.default_channel
        keep_client(channel)

        with channel.conn_or_acquire() as first, channel.conn_or_acquire() as second:
            assert first is second
            assert channel.client is not first, "that of the event loop is its own"
        channel._disconnect_pools()
        with channel.conn_or_acquire() as anew:
            assert anew is not first
            assert anew.ping()


def test_messages_are_fetched_and_acknowledged_by_it(own_valkey: embedded.Valkey) -> None:
    app = Celery("shop", broker=own_valkey.url, set_as_current=False)
    with app.connection_for_write() as connection:
        keep_client(connection.default_channel)
        queue = connection.SimpleQueue("kept")
        for number in range(3):
            queue.put(number)
        got = [queue.get(timeout=5) for _ in range(3)]
        with connection.default_channel.conn_or_acquire() as client:
            assert client.hlen("unacked") == 3
            for message in got:
                message.ack()
            assert client.hlen("unacked") == 0
        assert [message.payload for message in got] == [0, 1, 2]
        queue.close()
    app.close()


def test_a_channel_whose_first_close_failed_half_way_is_closed_again(
    own_valkey: embedded.Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Connection(own_valkey.url)
    channel = connection.default_channel
    keep_client(channel)
    Producer(channel).publish(1, routing_key="kept", declare=[Queue("kept")])
    received: list[object] = []
    Consumer(channel, [Queue("kept")], callbacks=[lambda body, _: received.append(body)]).consume()
    while not received:
        connection.drain_events(timeout=5)
    channel._brpop_start()
    own_valkey.kill()
    # As Celery's consumer does it. kombu passes over what its poller raises, and gives the connection up.
    monkeypatch.setattr(connection.transport.cycle, "close", raising(OSError))
    connection.collect(socket_timeout=1)
    assert not channel.closed

    ignore_errors(connection, connection.close)

    assert connection._closed


def raising(error: type[Exception]) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_other_brokers_are_left_alone() -> None:
    with Connection("memory://") as connection:
        channel = connection.default_channel
        before = dict(vars(channel))

        keep_client(channel)

        assert vars(channel) == before
