"""A worker reads from Redis by `MultiChannelPoller.on_readable`, whichever channel it is for."""

from __future__ import annotations

import inspect
from typing import Any

import kombu
import pytest
import redis
from kombu.transport.redis import MultiChannelPoller

from celery_sidejob.hooks.patches import celery_worker
from tests.tools.waiting import wait_until


def test_what_is_no_message_is_dropped_and_told_of(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert list(inspect.signature(MultiChannelPoller.on_readable).parameters) == ["self", "fileno"]
    got: list[Any] = []
    with kombu.Connection(redis_url) as connection, redis.Redis.from_url(redis_url) as server:
        consumer = connection.Consumer(
            kombu.Queue("q"), callbacks=[lambda body, message: got.append(body)], no_ack=True
        )
        celery_worker.drop_unreadable(connection.transport.cycle)
        consumer.consume()
        server.lpush("q", "no JSON", "5", "{}", "[" * 100_000)
        connection.Producer().publish("good", routing_key="q")

        def has_come() -> bool:
            connection.drain_events(timeout=20)
            return got == ["good"]

        wait_until(has_come, timeout=20, message="the good one")

    assert caplog.text.count("is no message, and was dropped") == 4
