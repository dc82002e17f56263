"""A Valkey with a replica, and a sentinel that makes the replica the master when the master is gone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from celery_sidejob import embedded
from celery_sidejob.embedded.server import HOST, Server, write_private
from celery_sidejob.embedded.valkey import _binary
from tests.tools.waiting import wait_until

MASTER = "shop"
"""The name by which the sentinel knows its master."""
SETTINGS = {"down-after-milliseconds": "500", "failover-timeout": "1000"}


class SentinelServer(Server):
    """One sentinel, which is enough to decide (quorum 1)."""

    name = "Sentinel"
    stop_signal = signal.SIGTERM
    orphan_signal = signal.SIGKILL

    def __init__(self, master_port: int, password: str) -> None:
        super().__init__()
        self._master_port = master_port
        self._password = password

    @property
    def url(self) -> str:
        """The sentinel itself, as redis-py knows it."""
        return f"redis://{HOST}:{self.port}"

    def _prepare(self, home: Path) -> None:
        settings = {"monitor": f"{HOST} {self._master_port} 1", "auth-pass": self._password, **SETTINGS}
        lines = [f"sentinel {name} {MASTER} {value}" for name, value in settings.items()]
        write_private(home / "sentinel.conf", "\n".join([f"bind {HOST}", *lines]) + "\n")

    def _command(self, home: Path, port: int) -> list[str]:
        return [str(_binary()), "sentinel.conf", "--port", str(port), "--sentinel"]

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


class Watched:
    """The two servers and their sentinel."""

    def __init__(self, servers: tuple[embedded.Valkey, embedded.Valkey], sentinel: SentinelServer, password: str):
        self.sentinel = sentinel
        self.password = password
        self._servers = servers
        self._asking: Any = redis.Redis.from_url(sentinel.url, decode_responses=True)

    @property
    def master(self) -> embedded.Valkey:
        """Who is the master, as the sentinel says."""
        return self._of(int(self._asking.sentinel_get_master_addr_by_name(MASTER)[1]))

    @contextmanager
    def client(self) -> Iterator[Any]:
        """A client of the master."""
        with redis.Redis(host=HOST, port=self.master.port, password=self.password) as client:
            yield client

    def wait_for_replica(self) -> None:
        """Return when the sentinel would promote the replica, and that has all there is."""

        def seen() -> bool:
            (replica,) = self._asking.sentinel_slaves(MASTER)
            return bool(replica["master-link-status"] == "ok" and replica["slave-priority"])

        wait_until(seen, timeout=30, message="the sentinel to see the replica")
        with self.client() as master:
            wait_until(lambda: master.wait(1, 1000) == 1, message="the replica to have all")

    def _of(self, port: int) -> embedded.Valkey:
        return next(server for server in self._servers if server.port == port)


@contextmanager
def watched() -> Iterator[Watched]:
    """A master, its replica and their sentinel within the block."""
    with embedded.Valkey() as first, embedded.Valkey() as second:
        with redis.Redis.from_url(first.url) as client:
            password = str(client.connection_pool.connection_kwargs["password"])
            client.config_set("repl-diskless-sync-delay", 0)
            client.config_set("masterauth", password)
        with redis.Redis.from_url(second.url) as client:
            client.config_set("masterauth", password)
            client.config_set("repl-diskless-sync-delay", 0)
            client.replicaof(HOST, first.port)
            client.config_set("requirepass", password)
        with SentinelServer(first.port, password) as sentinel:
            servers = Watched((first, second), sentinel, password)
            servers.wait_for_replica()
            yield servers
