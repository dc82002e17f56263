"""Servers that could not keep the promises are refused when a connection opens, doubtful ones warned of."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
import redis
from kombu import Connection

from celery_sidejob import embedded
from celery_sidejob.embedded.server import HOST, free_port
from celery_sidejob.embedded.valkey import _binary
from celery_sidejob.transport.transport import UnsuitableServerError
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.conftest import ours


def test_a_server_that_forbids_scripts_is_refused(own_valkey: embedded.Valkey) -> None:
    with redis.Redis.from_url(own_valkey.url) as server:
        server.acl_setuser("shop", enabled=True, passwords=["+secret"], keys="*", categories=["+@all", "-@scripting"])
    parts = urlsplit(ours(own_valkey.url))
    url = parts._replace(netloc=f"shop:secret@{parts.hostname}:{parts.port}").geturl()
    with pytest.raises(UnsuitableServerError, match="does not run scripts") as refused, Connection(url) as connection:
        connection.connect()
    assert "secret" not in str(refused.value)


def test_a_node_of_a_cluster_is_refused(processes: Processes) -> None:
    port = free_port()
    node = processes.start([str(_binary()), "--bind", HOST, "--port", str(port), "--cluster-enabled", "yes"])
    with redis.Redis(host=HOST, port=port) as client:
        wait_until(client.ping, message=f"{node!r} to answer")
    url = f"sidejob://{HOST}:{port}/0"
    with pytest.raises(UnsuitableServerError, match="Redis Cluster"), Connection(url) as connection:
        connection.connect()


def test_a_server_that_throws_messages_away_when_full_is_warned_of(
    own_valkey: embedded.Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    with Connection(ours(own_valkey.url)) as connection:
        connection.connect()
    assert caplog.messages == []
    with redis.Redis.from_url(own_valkey.url) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
    with Connection(ours(own_valkey.url)) as connection:
        connection.connect()
    assert re.search("maxmemory-policy allkeys-lru.*noeviction", caplog.text)
