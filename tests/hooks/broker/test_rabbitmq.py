"""Messages that are sent together to RabbitMQ, which answers for each."""

from __future__ import annotations

import inspect
import secrets

import kombu
from celery import Celery

from celery_sidejob.hooks.broker.connection import BrokerConnection
from celery_sidejob.hooks.broker.publishing import CeleryPublisher
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


def message_for(queue: str, number: int) -> Message:
    """A message of an ordinary durable task."""
    about = {
        "content_type": "application/json", "content_encoding": "utf-8", "headers": {"id": f"task-{number}"},
        "properties": {}, "exchange": "", "routing_key": queue, "delivery_mode": 2, "declare": [],
    }  # fmt: skip
    return Message(f"task-{number}", "noop", queue, "{}", b"[[], {}, {}]", about=about)
