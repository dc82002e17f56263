"""What Celery is told of a consumer that RabbitMQ cancels, and of a connection that broke."""

from __future__ import annotations

import kombu
import pytest
from amqp.exceptions import ConsumerCancelled
from celery.worker.loops import _quick_drain

from celery_sidejob.hooks import rabbitmq
from tests.tools.proxy import TcpProxy

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
