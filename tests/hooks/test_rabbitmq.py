"""What Celery's event loop is told of a consumer that RabbitMQ cancels."""

from __future__ import annotations

import kombu
import pytest
from amqp.exceptions import ConsumerCancelled
from celery.worker.loops import _quick_drain

from celery_sidejob.hooks import rabbitmq

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
