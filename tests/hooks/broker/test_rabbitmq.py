"""What Celery is told of a consumer that RabbitMQ cancels, and of a connection that broke."""

from __future__ import annotations

import secrets

import kombu
import pytest
from amqp.exceptions import ConsumerCancelled
from celery import Celery
from celery.worker.loops import _quick_drain

from celery_sidejob.hooks.broker import rabbitmq
from celery_sidejob.hooks.broker.connection import BrokerConnection
from celery_sidejob.hooks.broker.publishing import CeleryPublisher
from celery_sidejob.model.durable import Message
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

TIMEOUT_S = 10.0


@pytest.mark.parametrize("hears", [True, False], ids=["ours", "celery's own, which needs it"])
def test_a_queue_that_is_deleted_in_the_first_moments_of_consuming(amqp_url: str, hears: bool) -> None:
    with kombu.Connection(amqp_url) as connection, kombu.Connection(amqp_url) as other:
        if hears:
            rabbitmq.hearing_cancellations(connection)
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
                rabbitmq.noticing_breaks(connection)
            proxy.cut()
            with pytest.raises(connection.connection_errors):
                consumer.channel.basic_ack(1)

            if hears:
                with pytest.raises(connection.connection_errors):
                    connection.drain_events(timeout=0.1)
            else:
                with pytest.raises(TimeoutError):  # of another connection, on which nothing is consumed
                    connection.drain_events(timeout=0.1)


def test_messages_that_a_full_queue_rejects_are_not_taken_for_published(amqp_url: str) -> None:
    """They are sent together, and RabbitMQ answers for each: it has those that were taken before it was full."""
    full, other = "full-" + secrets.token_hex(4), "other-" + secrets.token_hex(4)
    app = Celery("shop", broker=amqp_url, set_as_current=False)
    publisher = CeleryPublisher(app, BrokerConnection(app), lambda jobs: None)
    with kombu.Connection(amqp_url) as connection:
        channel = connection.default_channel
        channel.queue_declare(full, arguments={"x-max-length": 2, "x-overflow": "reject-publish"}, auto_delete=False)
        channel.queue_declare(other, auto_delete=False)
        many = [message_for(full, number) for number in range(5)]

        sent = publisher.publish([*many, message_for(other, 5)])

        assert [one for one in sent if one.queue == full] == []
        assert connection.default_channel.queue_declare(full, passive=True).message_count == 2
        channel.queue_purge(full)
        wait_until(lambda: publisher.publish(many[:2]) == many[:2], timeout=20, message="the queue to be tried again")
        channel.queue_delete(full)
        channel.queue_delete(other)
    publisher.close()
    app.close()


def message_for(queue: str, number: int) -> Message:
    """A message of an ordinary durable task."""
    about = {
        "content_type": "application/json", "content_encoding": "utf-8", "headers": {"id": f"task-{number}"},
        "properties": {}, "exchange": "", "routing_key": queue, "delivery_mode": 2, "declare": [],
    }  # fmt: skip
    return Message(f"task-{number}", "noop", queue, "{}", b"[[], {}, {}]", about=about)
