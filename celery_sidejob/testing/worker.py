"""A real `celery worker` of the user's app, in its own processes: started, killed, stopped and frozen by a test."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

from ..embedded.account import temporary_path
from ..embedded.janitor import Janitor, uninterrupted
from ..embedded.processes import environment
from . import crashes, databases
from .processes import Process

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0

_numbers = itertools.count(1)


class Worker:
    """A worker of the app that ``celery -A app`` would find; as a context manager it is killed at the end of the block.

    `configuration` has keys of ``app.conf`` with their values in the worker. `env` has further environment variables.
    The other variables, `sys.path` and the working directory are those of this process.
    """

    def __init__(  # noqa: PLR0913 - each is an option of `celery worker`, or says where it runs
        self,
        app: str,
        *,
        configuration: Mapping[str, Any] | None = None,
        pool: str = "prefork",
        concurrency: int = 1,
        queues: str | Sequence[str] | None = None,
        extra: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.name = f"worker{next(_numbers)}-{secrets.token_hex(2)}@test"
        """Its name in remote control."""
        self._argv = [
            sys.executable, "-m", "celery", "-A", "celery_sidejob.testing.worker_app", "worker", "-n", self.name,
            "--loglevel=INFO", "--without-gossip", "--without-mingle", f"--pool={pool}", f"--concurrency={concurrency}",
        ]  # fmt: skip
        if queues:
            self._argv += ["-Q", queues if isinstance(queues, str) else ",".join(queues)]
        self._argv += extra
        self._directory = directory
        self._temporary: Path | None = None
        self._env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": _python_path(),
            "SIDEJOB_TEST_WORKER": json.dumps([app, dict(configuration or {}), databases.names()]),
        }
        self._given = dict(env or {})
        self._lives: list[Process] = []

    def __repr__(self) -> str:
        return f"<Worker {self.name}: {self._lives[-1] if self._lives else 'not started'}>"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *why: object) -> None:
        self.close()

    # -- its life ------------------------------------------------------------------------------------------------

    def start(self, timeout: float = READY_TIMEOUT_S) -> Self:
        """Start it, and return when it consumes; AssertionError with its output if it ends before that."""
        if self.alive:
            raise RuntimeError(f"{self!r} runs already.")
        home = self._home()
        ready = home / f"{self.name}-{len(self._lives)}.ready"
        log = home / f"{self.name}-{len(self._lives)}.log"
        with uninterrupted():
            crash = crashes.present
            env = {
                **self._env,
                "TMPDIR": str(self._scratch()),
                **self._given,
                **(crash.variables(self, home) if crash else {}),
                "SIDEJOB_TEST_READY": str(ready),
            }
            life = Process(self._argv, name=self.name, env=env, cwd=Path.cwd(), log_path=log)
            _janitor().watch_process(life.pid, signal.SIGKILL)
        self._lives.append(life)
        life.wait_for(ready.exists, timeout, what="was ready")
        return self

    def kill(self) -> None:
        """Kill all its processes at once, as a power cut does; when this returns they are gone.

        To kill only its main process, or a process of its pool, use `os.kill` with `pid` or one of `pool_pids`.
        """
        self._life.kill_group()
        _janitor().forget(self._life.pid)

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> int:
        """Stop it as a deployment does (SIGTERM): it finishes its runs; returns its exit code."""
        self._life.terminate()
        code = self._life.wait(timeout)
        self.kill()
        return code

    def restart(self, timeout: float = READY_TIMEOUT_S) -> Self:
        """Start it again with the same options, after a `stop()` if it runs."""
        if self.alive:
            self.stop()
        return self.start(timeout)

    def freeze(self) -> None:
        """Stop all its processes with SIGSTOP: it keeps its messages and locks, and sends no heartbeat."""
        self._life.freeze()

    def thaw(self) -> None:
        """Let a frozen worker continue."""
        self._life.thaw()

    def close(self) -> None:
        """Kill it if it runs, and remove its files."""
        if self._lives:
            self.kill()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            _janitor().forget(self._temporary)
            self._temporary = None

    # -- its processes and output --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether its main process runs, even frozen."""
        return bool(self._lives) and self._lives[-1].alive

    @property
    def pid(self) -> int:
        """The id of its main process."""
        return int(self._life.pid)

    @property
    def pool_pids(self) -> Sequence[int]:
        """The ids of its pool's processes; only `prefork` has any."""
        return self._life.children()

    def log(self) -> str:
        """Return its whole output, over all its starts."""
        return "".join(life.log() for life in self._lives)

    def log_tail(self) -> str:
        """Return the last lines of its output since its last start."""
        return self._lives[-1].log_tail() if self._lives else ""

    def wait_for_log(self, text: str, timeout: float = 10.0) -> None:
        """Return once it has written this text since its last start."""
        self._life.wait_for_log(text, timeout)

    @property
    def _life(self) -> Process:
        if not self._lives:
            raise RuntimeError(f"{self!r}: call start(), or use it in a `with` block.")
        return self._lives[-1]

    def _home(self) -> Path:
        if self._directory is None:
            return self._scratch()
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory

    def _scratch(self) -> Path:
        """Return a directory with a short path, for the temporary files that a killed worker does not remove itself."""
        if self._temporary is None:
            self._temporary = temporary_path()
            _janitor().watch_directory(self._temporary)
            self._temporary.mkdir(mode=0o700)
        return self._temporary


class Workers:
    """Starts workers of one app for a test, and kills them after it."""

    def __init__(self, app: str, configuration: Mapping[str, Any], directory: Path) -> None:
        self._app = app
        self._configuration = configuration
        self._directory = directory
        self.started: list[Worker] = []
        """All workers of the test, including those that have ended."""

    def start(self, *, configuration: Mapping[str, Any] | None = None, **options: Any) -> Worker:
        """Start a worker, and return when it consumes; the options are those of `Worker`."""
        both = {**self._configuration, **(configuration or {})}
        worker = Worker(self._app, configuration=both, directory=self._directory, **options)
        self.started.append(worker)
        return worker.start()

    def close(self) -> None:
        """Kill the workers that run."""
        for worker in self.started:
            worker.close()


def _python_path() -> str:
    """Return a PYTHONPATH with which a process imports the same modules as this process."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


@cache
def _janitor() -> Janitor:
    """Return the janitor that kills this process's workers if it dies itself."""
    made = Janitor(environment())
    atexit.register(made.close)
    return made
