"""Processes that a test starts, kills and freezes: a frozen one neither runs nor dies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..embedded.janitor import process_table
from ..embedded.processes import children, send_all
from .waiting import patient, wait_until

LOG_TAIL_LINES = 60
STOPPED = "T"
DEAD = ("Z", "X")


Start = Callable[..., Any]
"""Starts a process as `start_process` does; returns an object with the methods of `subprocess.Popen`."""


def start_process(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path) -> Any:
    """Start a process in its own session, whose output goes to a file."""
    with log_path.open("wb") as sink:
        return subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Process:
    """A process with its own session, whose output goes to a file.

    Its "group" is the whole session: itself, its pool's processes, and children that outlive it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str],
        cwd: Path,
        log_path: Path,
        start: Start = start_process,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._started = start(argv, env=env, cwd=cwd, log_path=log_path)
        self.pid = self._started.pid

    def __repr__(self) -> str:
        state = "alive" if self.alive else f"ended with {self._started.returncode}"
        return f"<{type(self).__name__} {self.name} pid={self.pid} {state}>"

    @property
    def alive(self) -> bool:
        """Whether the main process has not ended; a frozen process is alive."""
        return self._started.poll() is None

    def log(self) -> str:
        """Return everything it has written, to standard output and standard error; nothing before it has begun."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.log().splitlines()[-lines:])

    def wait_for_log(self, text: str, timeout: float = 10.0, *, count: int = 1) -> None:
        """Return once `text` has been written `count` times; AssertionError at once if the process ends before that."""
        self.wait_for(lambda: self.log().count(text) >= count, timeout, what=f"wrote {text!r}")

    def wait_for(self, fact: Any, timeout: float, *, what: str) -> None:
        """Return once the fact is true; AssertionError at once if the process ends before that."""

        def outcome() -> str:
            alive = self.alive  # asked before the fact: the process's last effect must not be missed
            if fact():
                return "true"
            return "" if alive else "ended"

        try:
            how = wait_until(outcome, timeout=timeout, message=f"{self!r} {what}")
        except TimeoutError as late:
            raise TimeoutError(f"{late}; its log ends with:\n{self.log_tail()}") from None
        if how == "ended":
            raise AssertionError(f"{self!r} before it {what}; its log ends with:\n{self.log_tail()}")

    def wait(self, timeout: float = 10.0) -> int:
        """Return its exit code, or minus the signal that ended it, once the main process has ended."""
        timeout = patient(timeout)
        try:
            return int(self._started.wait(timeout))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self!r} not ended within {timeout:g} s:\n{self.log_tail()}") from None

    def terminate(self) -> None:
        """Send SIGTERM to the main process: a worker's warm shutdown. Does not wait."""
        self._started.send_signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """Send SIGKILL to everything in its session; on return all of it is gone."""

        def all_gone() -> bool:
            members = self.group()
            send_all(members, signal.SIGKILL)
            self._started.poll()
            return not members

        wait_until(all_gone, message=f"all processes of {self!r} to be gone")
        self._started.wait(10)

    def freeze(self) -> None:
        """Send SIGSTOP to everything in its session; on return all of it is stopped."""
        freeze(self.group)

    def thaw(self) -> None:
        """Send SIGCONT to everything in its session."""
        thaw(self.group)

    def children(self) -> list[int]:
        """Return the direct children of the main process: a prefork worker's pool."""
        alive = set(self.group())
        return [pid for pid in children(self.pid) if pid in alive]

    def group(self) -> list[int]:
        """Return every live process in its session, even if the main process is gone."""
        return session(self.pid)


# -- frozen groups (SIGSTOP) -------------------------------------------------------------------------------------------


def freeze(find: Callable[[], Iterable[int]]) -> None:
    """Stop all processes that `find` returns, and new ones that appear meanwhile; on return all are stopped."""

    def all_stopped() -> bool:
        pids, table = set(find()), process_table()
        moving = [pid for pid in pids if pid in table and table[pid][0] != STOPPED]
        send_all(moving, signal.SIGSTOP)
        return not moving

    wait_until(all_stopped, message="all processes to stand still")


def thaw(find: Callable[[], Iterable[int]]) -> None:
    """Let all processes that `find` returns go on."""
    send_all(find(), signal.SIGCONT)


def session(leader: int) -> list[int]:
    """Return the live processes of the session that a process has begun, even if that process is gone."""
    table = process_table()
    return [pid for pid, (state, _, _) in table.items() if state not in DEAD and _session_of(pid) == leader]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None
