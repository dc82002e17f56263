"""py-amqp publishes by `basic_publish_confirm` on a channel with confirms, and by `_basic_publish` beneath that."""

from __future__ import annotations

import secrets

import kombu
import pytest
from amqp import Channel

from celery_sidejob.hooks.patches.connections import without_confirmations


def test_messages_of_a_block_wait_for_no_answer_and_all_answers_come(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = kombu.Queue("confirmed-" + secrets.token_hex(4), auto_delete=True)
    begun: list[None] = []
    answered: list[tuple[int, bool]] = []
    with kombu.Connection(amqp_url, transport_options={"confirm_publish": True}) as connection:
        channel = connection.default_channel
        assert channel.basic_publish == channel.basic_publish_confirm
        channel.events["basic_ack"].add(lambda tag, multiple: answered.append((tag, multiple)))
        producer = kombu.Producer(channel)
        queue(channel).declare()

        with without_confirmations(channel, lambda: begun.append(None)):
            assert channel.basic_publish != channel.basic_publish_confirm
            with monkeypatch.context() as block:
                block.setattr(channel, "wait", lambda *_, **__: pytest.fail("it waited"))
                for number in range(20):
                    producer.publish(number, routing_key=queue.name)
            while max([tag for tag, _ in answered], default=0) < 20:
                connection.drain_events(timeout=10)

        assert len(begun) == 20
        assert channel.basic_publish == channel.basic_publish_confirm
        producer.publish(20, routing_key=queue.name)  # waits, and py-amqp does not select confirms again
        assert answered[-1][0] == 21
        assert isinstance(channel, Channel)
        channel.queue_delete(queue.name)
