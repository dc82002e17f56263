"""The Celery processes of the demo. They end with it, even if the demo is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from celery_sidejob.embedded.account import temporary_path
from celery_sidejob.embedded.janitor import Janitor, uninterrupted
from celery_sidejob.embedded.processes import TRAMPOLINE, tail
from celery_sidejob.embedded.processes import environment as server_environment

EXAMPLES = Path(__file__).resolve().parent.parent
STOP_DEADLINE_S = 8.0
HASTE_DEADLINE_S = 1.0
"""How long a worker has for its warm shutdown, and after a signal. A run that is killed would only begin again."""


class CeleryProcess:
    """One `celery worker` or `celery beat` and its children, in a session of its own: Ctrl-C reaches only the demo.

    On Linux it is killed as soon as the demo's main thread ends, and its pool's processes with it (they ask the kernel
    for that); elsewhere the janitor kills them all.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path, janitor: Janitor
    ) -> None:
        self.name = name
        self.log = log
        celery = [sys.executable, "-m", "celery", "-A", "code_census", *arguments, "--loglevel", "INFO"]
        leave_with_us = [str(number) for number in (os.getpid(), int(signal.SIGKILL), -1, -1)]
        with log.open("wb") as sink, uninterrupted():
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(TRAMPOLINE), *leave_with_us, *celery],
                cwd=EXAMPLES,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.pid = self._process.pid
            janitor.watch_process(self.pid, signal.SIGKILL)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """`kill -9` all its processes at once; returns when the first of them is gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop it (SIGSTOP) within the block, so that nothing changes while we look."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Begin a warm shutdown; does not wait for it."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def wait(self, deadline_s: float) -> None:
        """Wait until it has ended; after the deadline kill it."""
        try:
            self._process.wait(max(0.0, deadline_s))
        except subprocess.TimeoutExpired:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:  # not reaped yet, so the group's number is still its own
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)


class Workers:
    """Two workers and a beat, with their logs in a directory."""

    def __init__(self, directory: Path, environment: Mapping[str, str], janitor: Janitor) -> None:
        self._directory = directory
        # A killed worker leaves its temporary files; here they are removed with the directory.
        self._environment = {**environment, "TMPDIR": str(directory)}
        self._janitor = janitor
        self.workers: list[CeleryProcess] = []
        self._all: list[CeleryProcess] = []

    def start(self) -> None:
        """Start them; they are ready a little later."""
        for number in (1, 2):
            name = f"{self._environment['CENSUS_QUEUE']}_{number}@%h"  # no worker of another demo has it
            # The demo does not need Celery's gossip between workers.
            node = ["--hostname", name, "--concurrency", "2", "--without-gossip", "--without-mingle"]
            self.workers.append(self._start(f"worker {number}", ["worker", *node]))
        schedule = self._directory / "beat-schedule"
        self._start("beat", ["beat", "--pidfile=", "--schedule", str(schedule)])

    def kill(self, worker: CeleryProcess) -> None:
        """`kill -9` a worker, and remove it from the list."""
        worker.kill()
        self._janitor.forget(worker.pid)
        self.workers.remove(worker)
        self._all.remove(worker)

    def dead(self) -> CeleryProcess | None:
        """Return a process that has ended by itself, if there is one."""
        return next((process for process in self._all if not process.is_alive), None)

    def logs(self) -> str:
        """Return the last lines of each log."""
        return "\n".join(f"--- {process.name}:\n{tail(process.log)}" for process in self._all)

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End all processes, in good order if they do so in time."""
        for process in self._all:
            process.ask_to_stop()
        end_at = time.monotonic() + deadline_s
        for process in self._all:
            process.wait(end_at - time.monotonic())
            self._janitor.forget(process.pid)
        self.workers, self._all = [], []

    def _start(self, name: str, arguments: Sequence[str]) -> CeleryProcess:
        log = self._directory / f"{name.replace(' ', '-')}.log"
        process = CeleryProcess(name, arguments, environment=self._environment, log=log, janitor=self._janitor)
        self._all.append(process)
        return process


@contextmanager
def running_workers(environment: Mapping[str, str], in_haste: Callable[[], bool]) -> Iterator[Workers]:
    """Start two workers and a beat; at the end stop them, sooner if `in_haste()`, and remove their directory.

    The janitor removes the directory, so it is removed too if we are killed.
    """
    with closing(Janitor(server_environment())) as janitor:
        directory = temporary_path()
        janitor.watch_directory(directory)
        directory.mkdir(mode=0o700)
        workers = Workers(directory, environment, janitor)
        try:
            workers.start()
            yield workers
        finally:
            workers.stop(HASTE_DEADLINE_S if in_haste() else STOP_DEADLINE_S)
