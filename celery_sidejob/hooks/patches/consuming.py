"""Replaces `Consumer.consume` of kombu, and `QoS.callback` of kombu, of one worker on RabbitMQ.

Read in kombu 5.5.2 and 5.7.0, Celery 5.5.0 and 5.7.0. By the first Celery's loop begins to consume; by the second, an
attribute that its QoS calls with `prefetch_count`, it tells RabbitMQ how many messages it may send. Both are decided by
the worker's appetite (`hooks/worker/fetching.py`). If a later Celery begins or tells in another way, RabbitMQ sends as
much as `worker_prefetch_multiplier` says, and messages wait behind long runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace_consume(consumer: Any, by: Callable[[], None]) -> Callable[[], None]:
    """Have the consumer begin by `by`; returns kombu's own way."""
    before: Callable[[], None] = consumer.consume
    consumer.consume = by
    return before


def replace_prefetch(qos: Any, by: Callable[..., None]) -> Callable[..., Any]:
    """Have a prefetch given to `by`, which is called with the keyword `prefetch_count`; returns what tells RabbitMQ."""
    before: Callable[..., Any] = qos.callback
    qos.callback = by
    return before
