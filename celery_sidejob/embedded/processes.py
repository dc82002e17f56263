"""Child processes: started so that they cannot outlive their owner, ended within a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .janitor import uninterrupted

if TYPE_CHECKING:
    from .account import Account
    from .janitor import Janitor

TRAMPOLINE = Path(__file__).with_name("trampoline.py")
LOG_TAIL = 4000
PAUSE_S = 0.01
GROUP_DEADLINE_S = 5.0


class ServerError(RuntimeError):
    """A throwaway server was not found, did not start, or is not running. The message holds the end of its log."""


def spawn(
    command: Sequence[str],
    *,
    directory: Path,
    log: Path,
    account: Account | None,
    orphan_signal: signal.Signals,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Starts the command as a direct child that gets ``orphan_signal`` when the calling thread ends (Linux only).

    It has a process group of its own, so that Ctrl-C in the terminal reaches its owner alone, who stops it in order.
    """
    uid, gid = (-1, -1) if account is None else (account.uid, account.gid)
    numbers = (os.getpid(), int(orphan_signal), uid, gid)
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(TRAMPOLINE), *map(str, numbers), *command],
            cwd=directory,
            env=environment(),
            stdin=stdin,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(
    command: Sequence[str], *, directory: Path, log: Path, account: Account | None, janitor: Janitor, text: str = ""
) -> None:
    """Runs a command that ends by itself, with ``text`` as its input; raises `ServerError` when it fails.

    When this is interrupted, the command is ended, with all that it has started: by a gentle signal, because a killed
    Postgres leaves its shared memory behind, and those below `initdb` end when that does.
    """
    with tempfile.TemporaryFile(dir=directory) as source:  # a pipe would have to be closed whenever we are interrupted
        source.write(text.encode())
        source.seek(0)
        process = None
        try:
            with uninterrupted():
                process = spawn(
                    command,
                    directory=directory,
                    log=log,
                    account=account,
                    orphan_signal=signal.SIGTERM,
                    stdin=source.fileno(),
                )
                janitor.watch_process(process.pid, signal.SIGTERM)
            process.wait()
        finally:
            if process is not None:
                end_group(process, signal.SIGTERM, deadline_s=GROUP_DEADLINE_S)
                janitor.forget_process(process.pid)
    if process.returncode != 0:
        raise ServerError(f"{Path(command[0]).name} failed with exit code {process.returncode}:\n{tail(log)}")


def end(process: subprocess.Popen[bytes], polite: signal.Signals, *, deadline_s: float) -> None:
    """Sends the polite signal and waits for its end; past the deadline kills it with its children."""
    process.send_signal(polite)
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        kill_with_children(process)


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and its children at one moment, as a power cut does, and returns when all are gone.

    The children of a Postgres whose parent alone is killed finish their query first, and until then no other can
    start on its data.
    """
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # so that it makes no further child between the list and the kill
    family = [process.pid, *children(process.pid)]
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    wait_until(
        lambda: not any(is_alive(pid) for pid in family),
        deadline_s=10,
        failure=lambda: f"Processes {family} survive kill -9.",
    )


def end_group(process: subprocess.Popen[bytes], polite: signal.Signals, *, deadline_s: float) -> None:
    """Ends the process, which leads a group, and waits until all of the group have ended; past the deadline kills them.

    Does nothing when it has ended.
    """
    if process.poll() is not None:
        return

    def others() -> list[int]:
        return [
            pid for pid, (state, _, group) in _process_table().items() if group == process.pid != pid and state != "Z"
        ]

    process.send_signal(polite)
    try:
        process.wait(deadline_s)
        wait_until(lambda: not others(), deadline_s=deadline_s, failure=str)
    except (subprocess.TimeoutExpired, ServerError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not others(), deadline_s=10, failure=lambda: f"Processes {others()} survive kill -9.")


def children(pid: int) -> list[int]:
    """Lists the direct children of a process."""
    return [child for child, (_, parent, _) in _process_table().items() if parent == pid]


def is_alive(pid: int) -> bool:
    """Tells whether the process runs; a zombie, which only waits for its parent to take note, does not."""
    state, _, _ = _process_table().get(pid, ("Z", 0, 0))
    return state != "Z"


def wait_until(fact: Callable[[], bool], *, deadline_s: float, failure: Callable[[], str]) -> None:
    """Returns as soon as the fact is true; raises `ServerError` with the failure's text when the deadline passes."""
    end_at = time.monotonic() + deadline_s
    while not fact():
        if time.monotonic() > end_at:
            raise ServerError(failure())
        time.sleep(PAUSE_S)


def tail(log: Path, *, start: int = 0) -> str:
    """Returns the end of a log, without what stands before the byte ``start``."""
    with log.open("rb") as source:
        source.seek(max(start, log.stat().st_size - LOG_TAIL))
        return source.read().decode(errors="replace").strip()


def environment() -> Mapping[str, str]:
    """Returns what a server needs, no more: another account could read the rest, and PG* would change its settings."""
    kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C"}


def _process_table() -> dict[int, tuple[str, int, int]]:
    """Maps each process to the letter of its state, its parent and its group."""
    table = {}
    if sys.platform == "linux":  # where a slim image often has no `ps`
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The name before it is in parentheses and may hold spaces and parentheses of its own.
                state, parent, group = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue  # It ended while we were reading.
            table[int(entry.parent.name)] = (state, int(parent), int(group))
    else:
        words = ["ps", "-A", "-o", "pid=,ppid=,pgid=,state="]
        listing = subprocess.run(words, capture_output=True, text=True, check=True)
        for row in listing.stdout.splitlines():
            pid, parent, group, state = row.split()[:4]
            table[int(pid)] = (state[0], int(parent), int(group))
    return table
