"""Real `celery worker` and `celery beat` processes, started, killed and frozen by tests."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from celery import Celery

from celery_sidejob.testing.processes import Process as AnyProcess
from celery_sidejob.testing.processes import start_process
from tests.tools.fork_server import ForkServers, can_fork
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "COVERAGE_PROCESS_START",
    "SIDEJOB_DIRECT_URL",  # of a test whose store is behind a PgBouncer
)
READY_TIMEOUT_S = 30.0

P = TypeVar("P", bound="Process")


class Process(AnyProcess):
    """A process of a test of ours: `kill` is for the main process alone, as an out-of-memory killer would do it."""

    stop_signal = AnyProcess.freeze
    cont = AnyProcess.thaw

    def __init__(self, argv: Sequence[str], *, fork_server: ForkServers | None = None, **given: Any) -> None:
        forks = fork_server is not None and can_fork(argv, given["env"], given["cwd"])
        super().__init__(argv, start=fork_server.start if forks else start_process, **given)

    def send_signal(self, number: signal.Signals) -> None:
        """Send any signal to the main process; without effect once it has ended."""
        self._started.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the main process alone; when this returns it is gone, but its children may remain.

        On Linux the pool processes of a prefork worker have asked the kernel to be killed at that moment
        (celery.platforms), and are gone a little later, even in the middle of a task.
        """
        self._started.kill()
        self._started.wait(10)


class WorkerProcess(Process):
    """A `celery worker`."""

    nodename: str
    """The name it answers to in remote control."""

    def wait_for_answer(self, app: Celery, timeout: float) -> None:
        """Wait until the worker answers a command, and so was in its loop; one that it has not heard is sent again."""

        def answers() -> bool:
            return bool(app.control.inspect([self.nodename], timeout=1).ping())

        wait_until(answers, timeout=timeout, message=f"{self.nodename} to answer")


class Processes:
    """Starts processes for one test and ends all of them after it.

    A process is given the few variables of KEPT_VARIABLES, a PYTHONPATH by which it imports what the tests import, the
    guard's directory for temporary files, and the `env` of its call: nothing else of our own environment. With a fork
    server those that can are forked by it.
    """

    def __init__(
        self, directory: Path, guard: Guard, fork_server: ForkServers | None = None, *, pool: str = "prefork"
    ) -> None:
        self.started: list[Process] = []
        self.pool = pool
        """The pool of workers that are asked for without one."""
        self._directory = directory
        self._guard = guard
        self._fork_server = fork_server
        self._numbers = itertools.count(1)
        self._logs = itertools.count()
        directory.mkdir(exist_ok=True)

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Start any command; returns without waiting for anything."""
        return self._start(Process, argv, env=env or {}, name=name or "process", cwd=cwd)

    def start_python(
        self,
        source: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Start a Python program given as text: a client that is to die in the middle of something."""
        return self.start([sys.executable, "-c", source, *arguments], env=env, name=name or "python", cwd=cwd)

    def start_worker(
        self,
        app_module: str,
        *,
        env: Mapping[str, str],
        pool: str | None = None,
        concurrency: int = 1,
        queues: str | Sequence[str] | None = None,
        extra: Sequence[str] = (),
        name: str | None = None,
        cwd: Path | None = None,
        ready_timeout: float | None = READY_TIMEOUT_S,
    ) -> WorkerProcess:
        """Start a worker and return when it is ready to be given tasks; at once if `ready_timeout` is None."""
        name = name or f"worker{next(self._numbers)}"
        nodename = f"{name}@test"
        argv = [
            *_celery(app_module),
            "worker",
            "-n",
            nodename,
            "--loglevel=INFO",
            "--without-gossip",
            "--without-mingle",
        ]
        pool = pool or self.pool
        if pool == "awaited":  # bodies that the app makes coroutines
            pool, env = "asyncio", {**env, "AWAITED": "1"}
        argv += [f"--pool={pool}", f"--concurrency={concurrency}"]
        if queues:
            argv += ["-Q", queues if isinstance(queues, str) else ",".join(queues)]
        worker = self._start(WorkerProcess, [*argv, *extra], env=env, name=name, cwd=cwd)
        worker.nodename = nodename
        if ready_timeout is not None:
            worker.wait_for_log(f"{nodename} ready.", ready_timeout)
        return worker

    def start_beat(
        self,
        app_module: str,
        *,
        env: Mapping[str, str],
        extra: Sequence[str] = (),
        name: str | None = None,
        cwd: Path | None = None,
        ready_timeout: float | None = READY_TIMEOUT_S,
    ) -> Process:
        """Start a beat with a schedule file of its own and return when it has begun; `ready_timeout` as above."""
        name = name or f"beat{next(self._numbers)}"
        schedule = self._directory / f"{name}-schedule"
        argv = [*_celery(app_module), "beat", "--loglevel=INFO", "--pidfile=", f"--schedule={schedule}", *extra]
        beat = self._start(Process, argv, env=env, name=name, cwd=cwd)
        if ready_timeout is not None:
            beat.wait_for_log("beat: Starting...", ready_timeout)
        return beat

    def end(self, process: Process) -> None:
        """End one of them now, with everything in its session; only its log is left of it."""
        process.kill_group()
        self._guard.forget(process.pid)
        self.started.remove(process)

    def kill_all(self) -> list[int]:
        """End all processes started here, with everything in their sessions; returns those that survived it."""
        for process in self.started:
            process.kill_group()
            self._guard.forget(process.pid)
        return [pid for process in self.started for pid in process.group()]

    def _start(self, kind: type[P], argv: Sequence[str], *, env: Mapping[str, str], name: str, cwd: Path | None) -> P:
        log_path = self._directory / f"{next(self._logs):02}-{name}.log"
        # Not in the tree: what lies there would come before an installed wheel.
        process = kind(
            argv, name=name, env=environment({"TMPDIR": self._guard.temporary, **env}), cwd=cwd or self._directory,
            log_path=log_path, fork_server=self._fork_server,
        )  # fmt: skip
        self._guard.watch(process.pid)
        self.started.append(process)
        return process


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that a test starts."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **extra}


def python_path() -> str:
    """A PYTHONPATH by which a process imports the same package as we do, and `tests`.

    The tree comes last, so that where a wheel is installed its processes do not take the folder instead.
    """
    return os.pathsep.join([*(entry or os.getcwd() for entry in sys.path), str(ROOT)])


@pytest.fixture(scope="session")
def process_guard() -> Iterator[Guard]:
    """Kills the processes of this run if the run itself is killed."""
    with Guard() as guard:
        yield guard


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServers]:
    """What the processes of this run are forked by."""
    with ForkServers(environment({}), root=ROOT) as servers:
        yield servers


@pytest.fixture(scope="session")
def worker_pool() -> str:
    """The pool of workers that are asked for without one; the acceptance tests' `--pools` gives others."""
    return "prefork"


@pytest.fixture
def processes(
    request: pytest.FixtureRequest, tmp_path: Path, process_guard: Guard, fork_server: ForkServers, worker_pool: str
) -> Iterator[Processes]:
    """Starts processes for this test; they are gone after it, and when it fails their logs are shown."""
    started = Processes(tmp_path / "processes", process_guard, fork_server, pool=worker_pool)
    request.node.stash[PROCESSES] = started
    yield started
    assert started.kill_all() == []


PROCESSES = pytest.StashKey[Processes]()
"""Where a test has the processes that were started for it; a module, or the session, those that its tests share."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of a failed test's processes in its report, also of those that it shares with others."""
    report = yield
    if report.failed:
        found = [node.stash.get(PROCESSES, None) for node in item.listchain()]
        started = [process for processes in found if processes is not None for process in processes.started]
        report.sections += [(f"log of {process!r}", process.log_tail()) for process in started]
    return report


def _celery(app_module: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", app_module]
