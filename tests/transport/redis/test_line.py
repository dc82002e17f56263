"""What a channel publishes goes over one connection that it keeps, and over another where that is gone or taken."""

from __future__ import annotations

import os
from typing import Any

import pytest
import redis
from kombu import Connection

from celery_sidejob.transport.redis.scripts import PUT
from tests.tools.waiting import wait_until
from tests.transport.conftest import Connect


class TimeIsUp(Exception):
    """What a time limit of Celery raises wherever a task happens to be."""


def put(connection: Connection, number: int) -> None:
    """Publish one message."""
    connection.default_channel._put("line", {"number": number})


def numbers(server: redis.Redis) -> list[int]:
    """What was published, in order."""
    return [int(text.partition(b":")[2].strip(b" }")) for text in reversed(server.lrange("line", 0, -1))]


def clients(server: redis.Redis) -> set[str]:
    """The connections that the server has; kombu keeps those of whole apps for the tests that follow."""
    return {client["id"] for client in server.client_list(_type="normal")}


def test_all_goes_over_one_connection_which_the_channel_closes(connect: Connect, server: redis.Redis) -> None:
    others = clients(server)
    connection = connect()
    channel = connection.default_channel
    opened = clients(server)

    for number in range(20):
        put(connection, number)

    assert numbers(server) == list(range(20))
    assert len(clients(server) - opened) == 1
    channel.close()
    connection.release()
    wait_until(lambda: clients(server) <= others, message="all connections to be closed")


def test_after_redis_has_hung_up_each_message_is_there_once(connect: Connect, server: redis.Redis) -> None:
    connection = connect()
    connection.default_channel  # noqa: B018 - which connects
    others = clients(server)
    put(connection, 0)

    (line,) = clients(server) - others
    server.client_kill_filter(_id=line)
    put(connection, 1)
    put(connection, 2)

    assert numbers(server) == [0, 1, 2]


def test_a_server_that_has_forgotten_the_script_is_sent_it_again(connect: Connect, server: redis.Redis) -> None:
    connection = connect()
    put(connection, 0)

    server.script_flush()
    put(connection, 1)

    assert numbers(server) == [0, 1]
    assert server.script_exists(PUT.sha) == [True]


def test_what_is_interrupted_spoils_no_later_answer(
    connect: Connect, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    put(connection, 0)
    line: Any = connection.default_channel._line

    def interrupted(*_: Any, **__: Any) -> Any:
        raise TimeIsUp

    monkeypatch.setattr(line._connection, "read_response", interrupted)
    with pytest.raises(TimeIsUp):
        put(connection, 1)

    assert line._connection is None, "the answer to the interrupted one would be taken for the next one's"
    put(connection, 2)
    assert numbers(server) == [0, 1, 2]


def test_what_redis_refuses_is_raised_and_the_next_is_taken(connect: Connect, server: redis.Redis) -> None:
    connection = connect()
    server.set("line", "no list")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        put(connection, 0)

    server.delete("line")
    put(connection, 1)
    assert numbers(server) == [1]


def test_while_a_thread_is_speaking_another_goes_by_the_client(connect: Connect, server: redis.Redis) -> None:
    connection = connect()
    put(connection, 0)
    line: Any = connection.default_channel._line

    with line._lock:
        put(connection, 1)

    assert numbers(server) == [0, 1]


def test_a_process_that_was_forked_has_a_connection_of_its_own(connect: Connect, server: redis.Redis) -> None:
    connection = connect()
    put(connection, 0)
    line: Any = connection.default_channel._line
    parents = line._connection

    child = os.fork()
    if not child:
        status = 1
        try:
            put(connection, 1)
            status = int(line._connection is parents)
        finally:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    put(connection, 2)
    assert line._connection is parents
    assert numbers(server) == [0, 1, 2]
