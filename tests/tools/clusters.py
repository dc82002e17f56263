"""pytest-celery on local processes: its nodes, clusters and setups without a Docker engine.

All that pytest-celery wants of Docker is a handle: attrs, id, name, status, reload(), restart(), kill(), logs() and
exec_run() (pytest_docker_tools/wrappers/container.py). `ProcessHandle` and `ServerHandle` are that handle; its own
node and container classes stay in use, so a test written for these fixtures runs on containers as well.

A test module opts in by importing the fixtures, all of them:

    from tests.tools.clusters import (  # noqa: F401  fixtures, found by their names
        celery_backend,
        celery_broker,
        celery_setup_app,
        default_redis_backend,
        default_redis_broker,
        default_worker_container,
        default_worker_container_cls,
    )
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery._state import _set_current_app, get_current_app
from pytest_celery import (
    CeleryTestSetup,
    CeleryWorkerContainer,
    RedisContainer,
    RedisTestBackend,
    RedisTestBroker,
)

from celery_sidejob import embedded
from tests.tools.freezing import family
from tests.tools.workers import READY_TIMEOUT_S, Process, Processes, python_path

KILL = (None, "SIGKILL", "KILL", signal.SIGKILL)
# What `Container.ready()` looks at: no networks and no ports to wait for.
NO_DOCKER: dict[str, Any] = {
    "NetworkSettings": {"Networks": {}, "Ports": {}},
    "HostConfig": {"PortBindings": None},
    "Config": {"Env": [], "Hostname": "127.0.0.1"},
}


class ProcessHandle:
    """One worker in the place of one container: a kill takes all its processes, a restart makes new ones."""

    def __init__(self, processes: Processes, argv: list[str], *, env: dict[str, str], cwd: Path, name: str) -> None:
        self.id = uuid.uuid4().hex
        self.name = name
        self.attrs = NO_DOCKER
        self._processes = processes
        # A container's hostname is the beginning of its id, and pytest-celery takes the worker's name from there.
        self._argv = [word.replace("%h", self.id[:12]) for word in argv]
        self._env = env
        self._cwd = cwd
        self._lives: list[Process] = []
        self.start()

    @property
    def process(self) -> Process:
        """The process of its present life, or of its last one."""
        return self._lives[-1]

    @property
    def status(self) -> str:
        """In Docker's words."""
        return "running" if self.process.alive else "exited"

    def start(self) -> None:
        """Begin a new life."""
        self._lives.append(self._processes.start(self._argv, env=self._env, cwd=self._cwd, name=self.name))

    def reload(self) -> None:
        """Nothing: we look at the process each time."""

    def kill(self, number: str | int | None = None) -> None:
        """Send a signal to the main process; SIGKILL takes the whole group, as it does with a container."""
        if number in KILL:
            self.process.kill_group()
        else:
            self.process.send_signal(_signal(number))

    def restart(self, timeout: float = 10) -> None:
        """End this life, politely for `timeout` seconds, and begin a new one."""
        self.process.terminate()
        with contextlib.suppress(TimeoutError):
            self.process.wait(timeout)
        self.process.kill_group()
        self.start()

    def logs(self) -> bytes:
        """What all its lives have written."""
        return b"".join(life.log_path.read_bytes() for life in self._lives)

    def exec_run(self, command: str | list[str], **_: Any) -> tuple[int, bytes]:
        """Run a command where the worker runs; returns its exit code and what it has written."""
        words = shlex.split(command) if isinstance(command, str) else list(command)
        if words[0] == "python":
            words[0] = sys.executable
        done = subprocess.run(words, env=self._env, cwd=self._cwd, capture_output=True, check=False)
        return done.returncode, done.stdout + done.stderr


class ServerHandle:
    """One throwaway Valkey in the place of one container."""

    def __init__(self, server: embedded.Valkey, *, name: str, log: Path) -> None:
        self.id = uuid.uuid4().hex
        self.name = name
        self.attrs = NO_DOCKER
        self.server = server
        self._log = log

    @property
    def status(self) -> str:
        """In Docker's words."""
        try:
            return "running" if family(self.server.pid) else "exited"
        except embedded.ServerError:
            return "exited"

    def reload(self) -> None:
        """Nothing: we look at the process each time."""

    def kill(self, number: str | int | None = None) -> None:
        """Send a signal to the server."""
        if number in KILL:
            self.server.kill()
        else:
            os.kill(self.server.pid, _signal(number))

    def restart(self, timeout: float = 10) -> None:
        """Stop it if it runs, and start it at the same address with what it had."""
        if self.status == "running":
            self.server.restart()
        else:
            self.server.start()

    def logs(self) -> bytes:
        """What the server has written."""
        return self._log.read_bytes()


class LocalRedis(RedisContainer):
    """pytest-celery's Redis node at the address of a throwaway Valkey."""

    _container: ServerHandle

    @property
    def url(self) -> str:
        return self._container.server.url

    host_url = url  # the same from inside and outside: there is no container

    @property
    def hostname(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        return self._container.server.port


class LocalWorker(CeleryWorkerContainer):
    """pytest-celery's worker node on a local process."""

    _container: ProcessHandle

    @property
    def process(self) -> Process:
        """The process behind the node, for what a container cannot do: freeze, kill the main process alone."""
        return self._container.process

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        """The command of a container, with our interpreter and without the second a worker waits for others."""
        _, *rest = super().command("--without-gossip", "--without-mingle", "--concurrency=1", *args)
        return [sys.executable, "-m", "celery", *rest]

    def _wait_ready(self, timeout: float = READY_TIMEOUT_S) -> bool:
        # Of this life: the log of the node goes on through restarts and has said it before.
        self.process.wait_for_log(self.ready_prompt, timeout)
        return True


@pytest.fixture
def celery_broker(default_redis_broker: LocalRedis) -> RedisTestBroker:
    """Redis alone, where pytest-celery would run the test with each broker it knows."""
    return RedisTestBroker(default_redis_broker)


@pytest.fixture
def celery_backend(default_redis_backend: LocalRedis) -> RedisTestBackend:
    """Redis alone, where pytest-celery would run the test with each backend it knows."""
    return RedisTestBackend(default_redis_backend)


@pytest.fixture
def default_redis_broker(tmp_path: Path) -> Iterator[LocalRedis]:
    """A broker of this test's own, which it may kill and restart."""
    yield from _redis(tmp_path / "broker")


@pytest.fixture
def default_redis_backend(tmp_path: Path) -> Iterator[LocalRedis]:
    """A result backend of this test's own, which it may kill and restart."""
    yield from _redis(tmp_path / "backend")


@pytest.fixture
def default_worker_container_cls() -> type[CeleryWorkerContainer]:
    """Workers as local processes."""
    return LocalWorker


@pytest.fixture
def default_worker_container(
    default_worker_container_cls: type[LocalWorker],
    default_worker_command: list[str],
    default_worker_env: dict[str, str],
    default_worker_initial_content: dict[str, bytes],
    processes: Processes,
    tmp_path: Path,
) -> Iterator[LocalWorker]:
    """A worker whose app.py and task modules lie in a directory of its own."""
    home = tmp_path / f"worker-{next(_numbers)}"
    for path, content in default_worker_initial_content.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_bytes(content)
    env = {**default_worker_env, "PYTHONPATH": f"{home}:{python_path()}"}
    handle = ProcessHandle(processes, default_worker_command, env=env, cwd=home, name=home.name)
    worker = default_worker_container_cls(handle)
    assert worker.ready()
    yield worker
    handle.kill()


@pytest.fixture
def celery_setup_app(
    celery_setup_cls: type[CeleryTestSetup], celery_setup_config: dict[str, Any], celery_setup_name: str
) -> Iterator[Celery]:
    """The app of the setup, which is Celery's current app only as long as the test runs."""
    before = get_current_app()
    app = celery_setup_cls.create_setup_app(celery_setup_config, celery_setup_name)
    yield app
    app.close()
    _set_current_app(before)


_numbers = itertools.count(1)


def _redis(home: Path) -> Iterator[LocalRedis]:
    with embedded.Valkey(home) as server:
        yield LocalRedis(ServerHandle(server, name=home.name, log=home / "log"))


def _signal(number: str | int) -> signal.Signals:
    """A signal by what Docker accepts: "SIGTERM", "TERM" or 15."""
    if isinstance(number, int):
        return signal.Signals(number)
    return signal.Signals["SIG" + number.removeprefix("SIG")]
