"""Cleans up after an owner that was killed: ends its processes, and removes its directories.

PR_SET_PDEATHSIG, which `trampoline` sets, ends a server at once. But it reaches only that one process, exists only on
Linux, and removes no files. So a separate process waits on a pipe that the owner's death closes. It has its own
session, and ignores Ctrl-C and SIGTERM, which may be meant for a whole terminal or service.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

# It runs as a script without site-packages, so it imports nothing of this package.

DEADLINE_S = 10.0
"""Seconds within which a server must end by itself, and a directory must become empty."""
LOOK_S = 1.0
"""Seconds between two checks that the owner lives: a child that it has forked may keep the pipe open."""
PAUSE_S = 0.02
T = TypeVar("T")
FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Janitor:
    """Cleans up processes and directories that must not outlive this process.

    Announce a directory before you make it, and a process in the block that starts it (`uninterrupted`). Then a kill
    leaves nothing behind, whenever it comes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        with uninterrupted():
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                cwd="/",
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        """Dismiss the janitor; before this returns it cleans up everything that is still announced."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def watch_process(self, pid: int, number: signal.Signals) -> None:
        """If we die, send the signal to this leader of a process group, and kill the group after a deadline."""
        self._order(watch=pid, signal=int(number))

    def watch_directory(self, path: Path) -> None:
        """If we die, remove this directory and its contents, once the processes have ended."""
        self._order(watch=str(path))

    def forget(self, what: int | Path) -> None:
        """Forget a process that has ended, whose id may be reused, or a directory that was removed."""
        self._order(forget=what if isinstance(what, int) else str(what))

    def _order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the janitor was killed, which is no reason to stop
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and similar signals to the end of the block, so that a new process is announced first.

    A child inherits the blocking and must undo it: `trampoline` and the janitor do.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, FATAL)  # raises a delayed signal, so it belongs inside the try
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main(owner: int) -> None:
    """Follow the orders on standard input; when they end, clean up what is still announced."""
    for number in FATAL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    processes: dict[int, int] = {}
    directories: dict[str, None] = {}
    for order in _orders(owner):
        match order:
            case {"watch": int(pid), "signal": int(signal_number)}:
                processes[pid] = signal_number
            case {"watch": str(directory)}:
                directories[directory] = None
            case {"forget": int(pid)}:
                processes.pop(pid, None)
            case {"forget": str(directory)}:
                directories.pop(directory, None)
    _clear_up(processes, directories)


def _clear_up(processes: Mapping[int, int], directories: dict[str, None]) -> None:
    """End processes, each by its signal and its group by SIGKILL after that, and remove directories, the last first."""
    for pid, signal_number in processes.items():
        with suppress(ProcessLookupError, PermissionError):
            (os.killpg if signal_number == signal.SIGKILL else os.kill)(pid, signal_number)
    for pid in processes:
        _await(_has_ended, pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for directory in reversed(directories):
        _await(_remove, directory)


def _orders(owner: int) -> Iterator[dict[str, Any]]:
    """Yield the owner's orders until the owner is gone."""
    received = b""
    while True:
        readable, _, _ = select.select([0], [], [], LOOK_S)
        if readable:
            more = os.read(0, 65_536)
            if not more:
                return  # an incomplete order is dropped: its step never happened
            *lines, received = (received + more).split(b"\n")
            yield from map(json.loads, lines)
        elif os.getppid() != owner:
            return


def _await(fact: Callable[[T], bool], of: T) -> None:
    end_at = time.monotonic() + DEADLINE_S
    while not fact(of) and time.monotonic() < end_at:
        time.sleep(PAUSE_S)


def _has_ended(group: int) -> bool:
    """Tell whether all processes of a group have ended; without a reaper, orphans stay as zombies for ever."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with suppress(OSError, subprocess.SubprocessError):  # on a system that does not show its processes
        return {state for state, _, its_group in process_table().values() if its_group == group} == {"Z"}
    return False


def process_table() -> dict[int, tuple[str, int, int]]:
    """Return the state (a letter, as of `ps`), the parent and the group of each process."""
    table = {}
    if sys.platform == "linux":  # where a slim image often has no `ps`
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                found = Path("/proc", pid, "stat").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended during the read, or is hidden from this user
            # The name before these is in parentheses, and may itself contain spaces and parentheses.
            state, parent, group = found.rpartition(")")[2].split()[:3]
            table[int(pid)] = (state, int(parent), int(group))
    else:
        words = ["ps", "-A", "-o", "pid=,ppid=,pgid=,state="]
        listing = subprocess.run(words, capture_output=True, text=True, check=True)
        for row in listing.stdout.splitlines():
            pid, parent, group, state = row.split()[:4]
            table[int(pid)] = (state[0], int(parent), int(group))
    return table


def _remove(directory: str) -> bool:
    """Remove a directory and tell whether it is gone: a process that just ended may have written into it."""
    shutil.rmtree(directory, ignore_errors=True)
    return not os.path.lexists(directory)


if __name__ == "__main__":
    main(int(sys.argv[1]))
