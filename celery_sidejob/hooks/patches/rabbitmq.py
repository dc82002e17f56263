"""Replaces methods of a channel of RabbitMQ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_waiting(channel: Any, note: Callable[[], None]) -> Iterator[None]:
    """Publish within the block without waiting for confirmations; `note` is called before each message.

    Replaces `Channel.basic_publish` of the RabbitMQ channel that we publish on, for one page; read in py-amqp 5.4.2.

    With `confirm_publish` py-amqp sets it to `basic_publish_confirm`, which waits for RabbitMQ's answer to each
    message. Within our block it is the plain `_basic_publish`, and the answers are matched by their numbers. So
    confirms must be selected before, as `basic_publish_confirm` does at its first message, recording it in
    `_confirm_selected`. If a later py-amqp confirms in another way, our wait for the answers of a page ends by its
    timeout, and its messages are sent one by one: copies do no harm.
    """
    if not channel._confirm_selected:
        channel._confirm_selected = True
        channel.confirm_select()
    confirming = channel.basic_publish

    def send(*args: Any, **options: Any) -> Any:
        note()
        return channel._basic_publish(*args, **options)

    channel.basic_publish = send
    try:
        yield
    finally:
        channel.basic_publish = confirming


def replace_consume(consumer: Any, by: Callable[[], None]) -> Callable[[], None]:
    """Let `by` begin the consumer; returns kombu's own method.

    Replaces `Consumer.consume` of kombu, and `QoS.callback` of kombu, of one worker on RabbitMQ.

    Read in kombu 5.5.2 and 5.7.0, Celery 5.5.0 and 5.7.0. By the first Celery's loop begins to consume; by the second,
    an attribute that its QoS calls with `prefetch_count`, it tells RabbitMQ how many messages it may send. The worker's
    appetite decides both (`hooks/worker/fetching.py`). If a later Celery does either in another way, RabbitMQ sends as
    many messages as `worker_prefetch_multiplier` says, and messages wait behind long runs.
    """
    before: Callable[[], None] = consumer.consume
    consumer.consume = by
    return before


def replace_prefetch(qos: Any, by: Callable[..., None]) -> Callable[..., Any]:
    """Give a prefetch to `by`, called with the keyword `prefetch_count`; returns the function that tells RabbitMQ."""
    before: Callable[..., Any] = qos.callback
    qos.callback = by
    return before
