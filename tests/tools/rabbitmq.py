"""A RabbitMQ of the tests' own: one node on loopback ports, with its own cookie, data and name service.

Debian and others package it as `rabbitmq-server`; its plugin `rabbitmq_management`, by whose HTTP the tests make vhosts
and delete queues in milliseconds, comes with it (`rabbitmqctl` takes a second each time).
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

from celery_sidejob.embedded import ServerError
from celery_sidejob.embedded.server import HOST, Server, free_port, write_private

USER = "sidejob"


def _program() -> str | None:
    """Return the start script itself: Debian's wrapper around it insists on the account of the packaged server."""
    found = shutil.which("rabbitmq-server") or shutil.which("rabbitmq-server", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        return None
    real = Path(found).resolve()
    beside = real.with_name("rabbitmq-server")
    return str(beside.resolve() if beside.exists() else real)


PROGRAM = _program()
EPMD = shutil.which("epmd")
ENV = shutil.which("env") or "/usr/bin/env"
MISSING = "there is no RabbitMQ: install Debian's package `rabbitmq-server`, or set SIDEJOB_TEST_AMQP_URL"

SETTINGS = {
    "loopback_users": "none",
    "disk_free_limit.absolute": "1MB",
    "collect_statistics": "none",
    "management_agent.disable_metrics_collector": "true",
    "log.console": "true",
    "log.console.level": "warning",
    "log.file": "false",
}
THREADS = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none +A 4"
"""Two schedulers, which do not spin while they wait: several servers and workers share a small machine."""


class NameService(Server):
    """Erlang's epmd: without one of our own each node would leave a daemon behind."""

    name = "epmd"
    stop_signal = signal.SIGTERM
    orphan_signal = signal.SIGKILL

    @property
    def url(self) -> str:
        """Where nodes find it."""
        return f"{HOST}:{self.port}"

    def _prepare(self, home: Path) -> None:
        """It keeps nothing."""

    def _command(self, home: Path, port: int) -> list[str]:
        assert EPMD is not None, MISSING
        return [EPMD, "-address", HOST, "-port", str(port)]

    def _answers(self) -> bool:
        return _listens(self.port)


@dataclass(frozen=True)
class Node:
    """A node of our own that runs, perhaps started by another process of these tests."""

    port: int
    http_port: int
    password: str
    may_administer: ClassVar[bool] = True

    def vhost_url(self, vhost: str) -> str:
        """The ``amqp://`` URL of a vhost, "/" or one that was added."""
        return f"amqp://{USER}:{self.password}@{HOST}:{self.port}/{quote(vhost, safe='')}"

    def add_vhost(self, vhost: str) -> None:
        """Make a vhost that our user may do everything in."""
        name = quote(vhost, safe="")
        self.ask("PUT", f"/vhosts/{name}")
        self.ask("PUT", f"/permissions/{name}/{USER}", {"configure": ".*", "write": ".*", "read": ".*"})

    def delete_vhost(self, vhost: str) -> None:
        """Delete a vhost with all that is in it."""
        self.ask("DELETE", f"/vhosts/{quote(vhost, safe='')}")

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the management's HTTP; ServerError if it refuses."""
        connection = http.client.HTTPConnection(HOST, self.http_port, timeout=20)
        key = base64.b64encode(f"{USER}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {key}", "Content-Type": "application/json"}
        try:
            connection.request(method, f"/api{path}", None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ServerError(f"{method} {path}: {answer.status} {text}")
        return json.loads(text) if text else None


class RabbitMQ(Server):
    """A node that may be killed, restarted and frozen; `url` is its vhost "/"."""

    name = "RabbitMQ"
    stop_signal = signal.SIGTERM
    orphan_signal = signal.SIGKILL

    def __init__(self, **settings: str) -> None:
        super().__init__()
        self._settings = {**SETTINGS, **settings}
        self._password = secrets.token_hex(16)
        self._node = f"sidejob_{secrets.token_hex(6)}@localhost"
        self._names = NameService()
        self._http_port = self._distribution_port = 0

    @property
    def url(self) -> str:
        """An ``amqp://`` URL for Celery's ``broker_url``."""
        return self.node.vhost_url("/")

    @property
    def node(self) -> Node:
        """What there is to ask of it while it runs."""
        return Node(self.port, self._http_port, self._password)

    def stop(self) -> None:
        """End the node, at once, since nothing of it is kept, and its name service."""
        if self._owner_pid == os.getpid() and self._process is not None and self._process.poll() is None:
            self.kill()
        super().stop()
        self._names.stop()

    def _prepare(self, home: Path) -> None:
        self._names.start()
        self._http_port, self._distribution_port = free_port(), free_port()
        write_private(home / ".erlang.cookie", secrets.token_hex(16))
        (home / ".erlang.cookie").chmod(0o400)
        write_private(home / "enabled_plugins", "[rabbitmq_management].\n")

    def _command(self, home: Path, port: int) -> list[str]:
        settings = {
            "listeners.tcp.1": f"{HOST}:{port}",
            "management.tcp.ip": HOST,
            "management.tcp.port": str(self._http_port),
            "default_user": USER,
            "default_pass": self._password,
            **self._settings,
        }
        write_private(home / "rabbitmq.conf", "".join(f"{name} = {value}\n" for name, value in settings.items()))
        environment = {
            "HOME": home,
            "ERL_EPMD_PORT": self._names.port,
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_DIST_PORT": self._distribution_port,
            "RABBITMQ_MNESIA_BASE": home / "mnesia",
            "RABBITMQ_LOG_BASE": home / "logs",
            "RABBITMQ_PID_FILE": home / "pid",
            "RABBITMQ_CONFIG_FILE": home / "rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": home / "none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": home / "enabled_plugins",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{THREADS} -kernel inet_dist_use_interface {{127,0,0,1}}",
            "RUNNING_UNDER_SYSTEMD": "1",  # the node is our child itself, with no shell in between
        }
        assert PROGRAM is not None, MISSING
        return [ENV, *(f"{name}={value}" for name, value in environment.items()), PROGRAM]

    def _answers(self) -> bool:
        if not _listens(self.port):
            return False
        try:
            self.node.ask("GET", "/overview")
        except (OSError, http.client.HTTPException, ServerError):
            return False
        return True


LOOPBACK = ("127.0.0.1", "localhost")


class GivenRabbitMQ:
    """A RabbitMQ that the environment names: vhosts are made by `rabbitmqctl`, its process is left alone.

    Where we may not administer it, all tests are in the vhost of its URL: they name their queues uniquely.
    """

    def __init__(self, url: str, rabbitmqctl: str = "") -> None:
        self._url = url
        command = shlex.split(rabbitmqctl)
        if not command and shutil.which("rabbitmqctl") and urlsplit(url).hostname in LOOPBACK:
            command = ["rabbitmqctl"]
        self._rabbitmqctl = command
        self.may_administer = bool(command) and self._run("list_vhosts", check=False)

    def vhost_url(self, vhost: str) -> str:
        """The URL of a vhost that was added."""
        if not self.may_administer:
            return self._url
        return urlsplit(self._url)._replace(path=f"/{quote(vhost, safe='')}").geturl()

    def add_vhost(self, vhost: str) -> None:
        """Make a vhost that the user of the URL may do everything in."""
        if self.may_administer:
            self._run("add_vhost", vhost)
            self._run("set_permissions", "-p", vhost, urlsplit(self._url).username or "guest", ".*", ".*", ".*")

    def delete_vhost(self, vhost: str) -> None:
        """Delete a vhost with all that is in it."""
        if self.may_administer:
            self._run("delete_vhost", vhost)

    def _run(self, *arguments: str, check: bool = True) -> bool:
        done = subprocess.run([*self._rabbitmqctl, *arguments], check=check, capture_output=True)
        return done.returncode == 0


def is_installed() -> bool:
    """Whether a node of our own can be started."""
    return PROGRAM is not None and EPMD is not None


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
