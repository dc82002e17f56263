"""Messages that are sent together to RabbitMQ, which answers for each."""

from __future__ import annotations

import inspect
import secrets

import amqp
import kombu
import pytest
from celery import Celery

from celery_sidejob.hooks.broker.connection import BrokerConnection
from celery_sidejob.hooks.broker.publishing import CeleryPublisher
from celery_sidejob.hooks.broker.rabbitmq import ConfirmedProducer
from celery_sidejob.model.durable import Message
from tests.tools.waiting import wait_until


def test_where_kombu_has_what_is_checked_before_a_byte_is_sent() -> None:
    """`ConfirmedProducer` overrides a private method of kombu's, which passes all by its place."""
    names = list(inspect.signature(kombu.Producer._publish).parameters)
    around = ["priority", "content_type", "content_encoding", "headers", "properties", "routing_key"]
    assert names[:11] == ["self", "body", *around, "mandatory", "immediate", "exchange"]


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


@pytest.mark.parametrize("option", [{}, {"confirm_publish": True}])
def test_each_message_is_confirmed_alone_and_with_others(amqp_url: str, option: dict[str, bool]) -> None:
    """Also if the app has its own messages confirmed, by an option with which py-amqp waits after each."""
    name = "confirmed-" + secrets.token_hex(4)
    app = Celery("shop", broker=amqp_url, set_as_current=False)
    app.conf.broker_transport_options = option
    publisher = CeleryPublisher(app, BrokerConnection(app), lambda jobs: None)
    with kombu.Connection(amqp_url) as connection:
        channel = connection.default_channel
        channel.queue_declare(name, arguments={"x-max-length": 5, "x-overflow": "reject-publish"}, auto_delete=False)
        messages = [message_for(name, number) for number in range(6)]

        assert publisher.publish(messages[:1]) == messages[:1]
        assert publisher.publish(messages[1:4]) == messages[1:4]
        assert publisher.publish(messages[4:5]) == messages[4:5]
        assert publisher.publish(messages[5:]) == []

        assert channel.queue_declare(name, passive=True).message_count == 5
        channel.queue_delete(name)
    publisher.close()
    app.close()


def test_each_message_is_confirmed_after_the_broker_has_closed_the_channel(amqp_url: str) -> None:
    """py-amqp opens it again by itself: without confirms, and its messages are numbered from the beginning."""
    name = "closed-" + secrets.token_hex(4)
    app = Celery("shop", broker=amqp_url, set_as_current=False)
    broker = BrokerConnection(app)
    publisher = CeleryPublisher(app, broker, lambda jobs: None)
    messages = [message_for(name, number) for number in range(8)]
    with kombu.Connection(amqp_url) as connection:
        channel = connection.default_channel
        channel.queue_declare(name, auto_delete=False)
        assert publisher.publish(messages[:3]) == messages[:3]
        for sent in (messages[3:4], messages[4:]):
            with pytest.raises(amqp.NotFound):
                broker._producer.channel.queue_declare("nobody's", passive=True)
            assert publisher.publish(sent) == sent
            assert broker.ready, "no confirmation was missed"
        assert channel.queue_declare(name, passive=True).message_count == 8
        channel.queue_delete(name)
    publisher.close()
    app.close()


def test_a_queue_that_is_gone_is_declared_again_by_the_same_publish(amqp_url: str) -> None:
    """What came back from the first try says nothing of the second."""
    name = "gone-" + secrets.token_hex(4)
    with kombu.Connection(amqp_url) as connection, kombu.Connection(amqp_url) as other:
        producer, queue = ConfirmedProducer(connection.channel()), kombu.Queue(name, auto_delete=False)
        producer.publish({}, routing_key=name, declare=[queue])
        other.default_channel.queue_delete(name)
        producer.publish({}, routing_key=name, declare=[queue])
        assert other.default_channel.queue_declare(name, passive=True).message_count == 1
        other.default_channel.queue_delete(name)


def message_for(queue: str, number: int) -> Message:
    """A message of an ordinary durable task."""
    about = {
        "content_type": "application/json", "content_encoding": "utf-8", "headers": {"id": f"task-{number}"},
        "properties": {}, "exchange": "", "routing_key": queue, "delivery_mode": 2, "declare": [],
    }  # fmt: skip
    return Message(f"task-{number}", "noop", queue, "{}", b"[[], {}, {}]", about=about)
