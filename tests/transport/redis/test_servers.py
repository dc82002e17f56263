"""Servers that could not keep the promises are refused when a connection opens, doubtful ones warned of."""

from __future__ import annotations

import re
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from kombu import Connection

from celery_sidejob import embedded
from celery_sidejob.embedded.server import HOST, free_port
from celery_sidejob.embedded.valkey import _binary
from celery_sidejob.transport.redis import transport
from celery_sidejob.transport.redis.transport import UnsuitableServerError
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.conftest import Connect, ours
from tests.transport.consuming import Consuming, publish


def test_a_server_that_forbids_scripts_is_refused(own_valkey: embedded.Valkey) -> None:
    with redis.Redis.from_url(own_valkey.url) as server:
        server.acl_setuser("shop", enabled=True, passwords=["+secret"], keys="*", categories=["+@all", "-@scripting"])
    parts = urlsplit(ours(own_valkey.url))
    url = parts._replace(netloc=f"shop:secret@{parts.hostname}:{parts.port}").geturl()
    with pytest.raises(UnsuitableServerError, match="runs no scripts") as refused, Connection(url) as connection:
        connection.connect()
    assert "secret" not in str(refused.value)


def test_a_node_of_a_cluster_is_refused(processes: Processes) -> None:
    port, bus = free_port(), free_port()  # The bus would else be at port + 10,000, which another program may have.
    settings = ["--port", str(port), "--cluster-port", str(bus), "--cluster-enabled", "yes"]
    node = processes.start([str(_binary()), "--bind", HOST, *settings])
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


def test_a_server_that_is_made_a_replica_is_left(own_valkey: embedded.Valkey) -> None:
    with redis.Redis.from_url(own_valkey.url) as server, Connection(ours(own_valkey.url)) as connection:
        consuming = Consuming(connection, "queue", prefetch=1)
        consuming.drain(0.05)
        server.replicaof(HOST, 1)
        lost = connection.connection_errors
        with pytest.raises(lost, match="is a replica now"):
            consuming.drain(5)  # kombu's own raises what ends a worker
        with pytest.raises(lost, match="is a replica now"):
            publish(connection, "queue", 0)
        with pytest.raises(lost, match="is a replica, which accepts no messages"):
            Connection(ours(own_valkey.url)).connect()
        server.replicaof("no", "one")
        publish(connection, "queue", 1)
        assert consuming.take(1) == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"consumer_timeout": 0},
        {"consumer_timeout": "3"},
        {"delivery_limit": 0},
        {"delivery_limit": True},
        {"dead_list_limit": 0},
        {"dead_list_limit": 1.5},
        {"dead_list_days": -1},
        {"consumer_timeout": None},
    ],
    ids=str,
)
def test_an_option_that_cannot_be_meant_is_refused(connect: Connect, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} is a (whole )?number .* not {next(iter(options.values()))!r}"):
        connect(**options).connect()


@pytest.mark.parametrize(
    ("option", "meant"),
    [("consumer_timout", "consumer_timeout"), ("consumers_timeout", "consumer_timeout"),
     ("delivery_limits", "delivery_limit")],
)  # fmt: skip
def test_a_misspelt_option_is_refused(connect: Connect, option: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} is not a transport option. Did you mean {meant}[?]$"):
        connect(**{option: 3}).connect()


def test_options_of_other_transports_pass(connect: Connect) -> None:
    options = ("connect_timeout", "confirm_timeout", "delivery_mode", "max_retries", "confirm_publish")
    connect(**dict.fromkeys(options, 1)).connect()


@pytest.mark.parametrize(
    ("scheme", "meant"),
    [("sidejob+sentinel", "sidejob-sentinel"), ("sidejob+redis", "sidejob"), ("sidejob+rediss", "sidejobs"),
     ("sidejobs+x", "sidejobs")],
)  # fmt: skip
@pytest.mark.parametrize("place", ["alone", "first", "second"])
def test_a_scheme_with_a_plus_is_refused(broker_url: str, scheme: str, meant: str, place: str) -> None:
    wrong = urlsplit(broker_url)._replace(scheme=scheme, netloc="user:secret@127.0.0.1:1").geturl()
    url: Any = {"alone": wrong, "first": [wrong, broker_url], "second": f"{broker_url};{wrong}"}[place]
    with Connection(url) as connection, connection.clone() as clone:
        for one in (connection, clone):  # Celery's pools clone
            with pytest.raises(ValueError, match="kombu splits it") as refused:
                one.connect()
            assert str(refused.value).startswith(f"{scheme}://")
            assert str(refused.value).endswith(f"Did you mean {meant}://?")


def test_a_unix_socket_passes(processes: Processes, tmp_path: Path) -> None:
    path = tmp_path / "valkey"
    server = processes.start([str(_binary()), "--port", "0", "--unixsocket", str(path)])
    wait_until(path.exists, message=f"{server!r} to listen")
    with Connection(f"sidejob+socket://{path}") as connection:
        connection.connect()


def test_a_server_and_a_kombu_that_are_too_old_are_refused(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "OLDEST_REDIS", (99, 1))
    with pytest.raises(UnsuitableServerError, match=r"is Redis \d.* needs 99.1"):
        connect().connect()
    monkeypatch.setattr("kombu.VERSION", (5, 6, 2))
    spec = find_spec(transport.__name__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="needs kombu 5"):
        spec.loader.exec_module(module_from_spec(spec))
