"""The common part of the servers: a life from `start()` to `stop()`, a directory, a port and a password.

A server is stopped, running or down. `start()` makes it run. `stop()` ends it and forgets its directory and port. After
`kill()` it is down: it keeps both, for the next `start()`.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from .account import Account, own, temporary_path
from .janitor import Janitor, uninterrupted
from .processes import TRAMPOLINE, ServerError, environment, kill_with_children, tail, wait_until

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 20.0
HOST = "127.0.0.1"
PORTS = range(15_000, 32_000)
"""Below the ports that kernels give to clients: while the server is down, a client could get its port."""
PORTS_TO_TRY = 5


class PortTakenError(ServerError):
    """Another program took the port after we had found it free."""


class Server(ABC):
    """A server on a loopback port, behind a random password.

    Without a directory it uses a temporary directory, which `stop()` removes; a given directory is kept. Only the
    process that started the server may stop it: in a forked child `stop()` does nothing.
    """

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals]
    orphan_signal: ClassVar[signal.Signals]

    def __init__(self, directory: Path | None = None) -> None:
        self._given = None if directory is None else Path(directory).absolute()
        self._account: Account | None = None
        self._home: Path | None = None
        self._temporary: list[Path] = []
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._hired: Janitor | None = None
        self._owner_pid: int | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """The address with the password; the same after `kill()` and `restart()`."""

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1."""
        if self._port is None:
            raise ServerError(f"{self.name} is not started.")
        return self._port

    @property
    def pid(self) -> int:
        """The id of the process that receives signals."""
        return self._running().pid

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *why: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the server and wait until it answers; if it does not, raises `ServerError` with the end of its log."""
        if self._process is not None and self._process.poll() is None:
            raise ServerError(f"{self.name} is running already.")
        if self._process is not None:
            self._forget_process()  # it has ended by itself
        self._owner_pid = os.getpid()
        atexit.register(self.stop)
        try:
            if self._hired is None:
                self._hired = Janitor(environment())
            home = self._home or self._settle()
            (home / "log").touch(mode=0o600)
            if self._home is None:
                self._prepare(home)
                self._home = home
            self._launch_on_a_port(home)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server in good order and remove its temporary directories; does nothing if it is stopped."""
        if self._owner_pid != os.getpid():
            return
        self._end_process()
        # If this process dies here, the janitor removes the rest.
        while self._temporary:
            self._remove(self._temporary[-1])
            self._temporary.pop()
        if self._hired is not None:
            self._hired.close()
            self._hired = None
        self._home = self._port = self._owner_pid = None
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """End the server as a power cut would; its data, port and password stay for the next `start()`."""
        kill_with_children(self._running())
        self._forget_process()

    def restart(self) -> None:
        """Stop the server in good order and start it again at the same address."""
        self._running()
        self._end_process()
        self.start()

    @abstractmethod
    def _prepare(self, home: Path) -> None:
        """Prepare the directory for the first start; it may have been used before."""

    @abstractmethod
    def _command(self, home: Path, port: int) -> list[str]:
        """Return the command that serves on the port."""

    @abstractmethod
    def _answers(self) -> bool:
        """Tell whether the server answers a client."""

    def _settle(self) -> Path:
        """Return the server's directory, which is made if necessary."""
        if self._given is None:
            return self._temporary_directory()
        if not self._given.exists():
            self._given.mkdir(mode=0o700, parents=True)
            own(self._given, self._account)
        if self._account is not None and not self._account.can_enter(self._given):
            raise ServerError(
                f"We are root, so {self.name} runs as user {self._account.name}, who cannot enter {self._given}. "
                "Give a directory that user can enter, or none."
            )
        return self._given

    def _temporary_directory(self, *, longest: int | None = None) -> Path:
        path = temporary_path(self._account, longest=longest)
        self._temporary.append(path)
        self._make_passing(path)
        return path

    def _make_passing(self, path: Path) -> None:
        """Make a private directory for the account; if we die before `_remove`, the janitor removes it."""
        self._janitor.watch_directory(path)
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise ServerError(f"The directory {path} could not be made: {error.strerror}") from error
        own(path, self._account)

    def _remove(self, path: Path) -> None:
        if path.exists():
            shutil.rmtree(path)
        self._janitor.forget(path)

    def _launch_on_a_port(self, home: Path) -> None:
        """Launch on the port of the last start, which clients may know, or else on a free port."""
        if self._port is not None:
            return self._launch(home, self._port)
        for _ in range(PORTS_TO_TRY - 1):
            try:
                return self._launch(home, free_port())
            except PortTakenError:
                continue
        return self._launch(home, free_port())

    def _launch(self, home: Path, port: int) -> None:
        log = home / "log"
        start = log.stat().st_size
        self._port = port
        command = self._command(home, port)
        with uninterrupted():
            self._process = process = self._spawn(command, home, self.orphan_signal)
        wait_until(
            lambda: process.poll() is not None or self._answers(),
            deadline_s=START_DEADLINE_S,
            failure=lambda: f"{self.name} does not answer within {START_DEADLINE_S:.0f} s:\n{tail(log, start=start)}",
        )
        if process.poll() is not None:
            self._forget_process()
            said = tail(log, start=start)
            kind = PortTakenError if "address already in use" in said.lower() else ServerError
            raise kind(f"{self.name} ended with exit code {process.returncode}:\n{said}")

    def _spawn(
        self, command: Sequence[str], home: Path, orphan_signal: signal.Signals, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Start the command as a direct child that gets ``orphan_signal`` when the calling thread ends (Linux only).

        It has its own process group, so Ctrl-C in a terminal reaches only its owner, which stops it in good order.
        """
        uid, gid = (-1, -1) if self._account is None else (self._account.uid, self._account.gid)
        numbers = (os.getpid(), int(orphan_signal), uid, gid)
        with (home / "log").open("ab") as sink:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(TRAMPOLINE), *map(str, numbers), *command],
                cwd=home,
                env=environment(),
                stdin=stdin,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._janitor.watch_process(process.pid, orphan_signal)
        return process

    def _end_process(self) -> None:
        """Stop the process in good order; after the deadline kill it and its children."""
        if self._process is not None:
            self._process.send_signal(self.stop_signal)
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                kill_with_children(self._process)
            self._forget_process()

    def _forget_process(self) -> None:
        assert self._process is not None
        self._janitor.forget(self._process.pid)
        self._process = None

    @property
    def _janitor(self) -> Janitor:
        assert self._hired is not None
        return self._hired

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError(f"{self.name} is not running.")
        return self._process


def write_private(path: Path, text: str) -> None:
    """Write a file that only we can read; an older file at the path is replaced, not written into."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def free_port() -> int:
    """Return a loopback port on which no program listens now."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
    raise ServerError(f"None of 100 ports between {PORTS.start} and {PORTS.stop} is free on {HOST}.")
