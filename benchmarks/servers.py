"""The servers that benchmarks start, and the pools that they try."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.brokers import Broker, broker_of
from tests.tools.rabbitmq import MISSING, RabbitMQ, is_installed

POOLS = {"prefork -c 2": ("prefork", 2), "solo": ("solo", 1)}


@contextmanager
def servers(*, appendonly: bool = True) -> Iterator[tuple[embedded.Postgres, str]]:
    """A Postgres with its default, durable settings and our schema, and the URL of a Valkey."""
    with embedded.Postgres(durable=True) as postgres, embedded.Valkey(appendonly=appendonly) as valkey:
        upgrade(postgres.url)
        yield postgres, valkey.url


@contextmanager
def started_broker(kind: str, database_url: str) -> Iterator[Broker]:
    """An empty broker of this kind (`redis`, `sidejob`, `sidejobpg`, `amqp`), and a Valkey for results."""
    with ExitStack() as stack:
        redis_url = stack.enter_context(embedded.Valkey()).url
        if kind != "amqp":
            yield broker_of(kind, redis_url, lambda _: database_url)
        elif given := os.environ.get("SIDEJOB_TEST_AMQP_URL"):
            yield Broker(kind, given, redis_url)
        elif is_installed():
            yield Broker(kind, stack.enter_context(RabbitMQ()).url, redis_url)
        else:
            raise SystemExit(MISSING)
