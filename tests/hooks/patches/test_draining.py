"""`Connection.drain_events`, by which a worker waits for its broker; greenlets wait as threads do."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import kombu
import pytest
from amqp.exceptions import ConsumerCancelled
from celery.worker.loops import _quick_drain

from celery_sidejob import embedded
from celery_sidejob.hooks.patches import connections
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

TIMEOUT_S = 10.0
LOOP_S = 2.0
"""How long Celery's loop waits for something to read."""


def test_the_connection_for_events_is_looked_at_without_waiting(amqp_url: str) -> None:
    """Celery waits a tenth of a second each time; what is there is read all the same."""
    with kombu.Connection(amqp_url) as connection:
        queue = kombu.Queue("told", channel=connection.default_channel, auto_delete=True)
        told: list[str] = []
        with kombu.Consumer(connection.default_channel, [queue], callbacks=[lambda body, _: told.append(body)]):
            connections.look_without_waiting(connection)

            began = time.monotonic()
            for _ in range(100):
                _quick_drain(connection)
            assert time.monotonic() - began < 5  # ten, if it waited

            kombu.Producer(connection.default_channel).publish("here", routing_key="told")
            wait_until(lambda: _quick_drain(connection) or told == ["here"], timeout=TIMEOUT_S)


def test_redis_is_asked_for_more_as_soon_as_there_is_room(own_valkey: embedded.Valkey) -> None:
    got: list[int] = []
    ends: list[threading.Timer] = []

    def end_soon(body: int, message: Any) -> None:
        got.append(body)
        ends.append(threading.Timer(0.05, message.reject if body == 2 else message.ack))
        ends[-1].start()

    with kombu.Connection(own_valkey.url) as connection:
        channel = connection.default_channel
        queue = kombu.Queue("one by one", channel=channel)
        producer = kombu.Producer(channel)
        for number in range(5):
            producer.publish(number, routing_key=queue.name, declare=[queue])
        with kombu.Consumer(channel, [queue], callbacks=[end_soon], prefetch_count=1):
            connections.fetch_when_there_is_room(connection, channel.qos)

            began = time.monotonic()
            while len(got) < 5:
                with suppress(TimeoutError):
                    connection.drain_events(timeout=LOOP_S)
            assert time.monotonic() - began < 2 * LOOP_S  # four times that, if each waited for the loop's next turn
            for end in ends:
                end.join()

    assert got == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("hears", [True, False], ids=["ours", "celery's own, which needs it"])
def test_a_queue_that_is_deleted_in_the_first_moments_of_consuming(amqp_url: str, hears: bool) -> None:
    with kombu.Connection(amqp_url) as connection, kombu.Connection(amqp_url) as other:
        if hears:
            connections.hear_cancellations(connection)
        queue = kombu.Queue("vanishing", channel=connection.default_channel)
        with kombu.Consumer(connection.default_channel, [queue], accept=["json"]):
            other.default_channel.queue_delete("vanishing")
            if hears:
                with pytest.raises(ConsumerCancelled):
                    _quick_drain(connection, TIMEOUT_S)
            else:
                _quick_drain(connection, TIMEOUT_S)
                with pytest.raises(TimeoutError):  # it was there, and is not told again
                    connection.drain_events(timeout=0.1)


@pytest.mark.parametrize("hears", [True, False], ids=["ours", "celery's own, which needs it"])
def test_a_break_that_an_acknowledgement_has_seen_first(amqp_url: str, hears: bool) -> None:
    """With gevent the loop may wait for a greenlet meanwhile; Celery logs that the acknowledgement failed."""
    with TcpProxy.to(amqp_url) as proxy, kombu.Connection(proxy.url_for(amqp_url)) as connection:
        queue = kombu.Queue("broken", channel=connection.default_channel, auto_delete=True)
        with kombu.Consumer(connection.default_channel, [queue]) as consumer:
            if hears:
                connections.notice_breaks(connection)
            proxy.cut()
            with pytest.raises(connection.connection_errors):
                consumer.channel.basic_ack(1)

            if hears:
                with pytest.raises(connection.connection_errors):
                    connection.drain_events(timeout=0.1)
            else:
                with pytest.raises(TimeoutError):  # of another connection, on which nothing is consumed
                    connection.drain_events(timeout=0.1)
