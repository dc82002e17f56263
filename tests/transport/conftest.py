"""What tests of the transport are given: a broker of their own by both URLs, and a look into its Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from kombu import Connection

import celery_sidejob.transport  # noqa: F401  # makes sidejob:// known

Connect = Callable[..., Connection]


@pytest.fixture
def broker_url(redis_url: str) -> str:
    """The URL of an empty broker with reliable fetch."""
    return ours(redis_url)


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    """The same, as Redis sees it."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def connect(broker_url: str) -> Iterator[Connect]:
    """Opens connections to the broker, with transport options as keywords; they are closed after the test."""
    with ExitStack() as stack:

        def open_one(url: str = broker_url, **options: Any) -> Connection:
            return stack.enter_context(Connection(url, transport_options=options))

        yield open_one


def ours(redis_url: str) -> str:
    """The URL of a Redis with reliable fetch."""
    return urlsplit(redis_url)._replace(scheme="sidejob").geturl()


def unfinished(server: redis.Redis) -> int:
    """How many messages workers of either kind hold."""
    held = [*server.scan_iter("*unacked"), *server.scan_iter("*_sidejob.held.*")]
    return sum(server.hlen(key) for key in held)
