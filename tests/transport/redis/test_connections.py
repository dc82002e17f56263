"""A connection that something has interrupted is closed: the next who has it gets nobody else's answer or database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.connection import AbstractConnection

from celery_sidejob.embedded.server import HOST
from tests.tools.sentinel import MASTER, Watched, watched
from tests.tools.waiting import wait_until
from tests.transport.conftest import Connect


class TimeIsUp(Exception):
    """What a time limit of Celery raises wherever a task happens to be."""


@pytest.fixture
def servers() -> Iterator[Watched]:
    """A master, its replica and their sentinel."""
    with watched() as made:
        yield made


def interrupted(*_: Any, **__: Any) -> Any:
    """A time limit strikes."""
    raise TimeIsUp


def strikes_at(name: str) -> Callable[..., None]:
    """Send commands, but for one before which a time limit strikes."""
    send = AbstractConnection.send_command

    def send_until_then(connection: Any, *command: Any, **options: Any) -> None:
        if command[0] == name:
            raise TimeIsUp
        send(connection, *command, **options)

    return send_until_then


def test_one_that_was_not_ready_yet_is_not_used(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = connect().default_channel
    channel.pool.disconnect()
    client = channel._client_of_scripts
    with monkeypatch.context() as limited:
        limited.setattr(AbstractConnection, "send_command", strikes_at("CLIENT"))  # each connection gives its library
        with pytest.raises(TimeIsUp):
            client.ping()

    assert all(one._sock is None for one in channel.pool._available_connections)
    assert client.ping()


def test_an_answer_that_nobody_has_read_is_not_the_next_ones(
    connect: Connect, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect().default_channel._client_of_scripts
    server.set("one", "1")
    with monkeypatch.context() as limited:
        limited.setattr(client, "parse_response", interrupted)
        with pytest.raises(TimeIsUp):
            client.execute_command("GETDEL", "one")
    wait_until(lambda: not server.exists("one"), message="Redis to have answered")

    assert client.get("none") is None


def test_one_by_sentinels_is_closed_too(servers: Watched, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sidejob-sentinel://:{servers.password}@{HOST}:{servers.sentinel.port}/0"
    channel = connect(url, master_name=MASTER).default_channel
    client = channel._client_of_scripts
    client.set("one", "1")
    (connection,) = channel.pool._available_connections
    with monkeypatch.context() as limited:
        limited.setattr(connection._parser, "read_response", interrupted)
        with pytest.raises(TimeIsUp):
            client.get("one")

    assert connection._sock is None, "redis-py leaves it open, and its answer to the next"
    assert client.get("none") is None
