"""Child processes: started so that they cannot outlive their owner, ended within a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_sidejob.embedded.account import Account

TRAMPOLINE = Path(__file__).with_name("trampoline.py")
LOG_TAIL = 4000
PAUSE_S = 0.01


class ServerError(RuntimeError):
    """A throwaway server was not found, did not start, or is not running. The message holds the end of its log."""


def spawn(
    command: Sequence[str],
    *,
    directory: Path,
    log: Path,
    account: Account | None,
    orphan_signal: signal.Signals,
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
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(command: Sequence[str], *, directory: Path, log: Path, account: Account | None, text: str = "") -> None:
    """Runs a command that ends by itself, with ``text`` as its input; raises `ServerError` when it fails."""
    with log.open("ab") as sink:
        done = subprocess.run(
            command,
            cwd=directory,
            env=_environment(),
            input=text.encode(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            check=False,
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
        )
    if done.returncode != 0:
        raise ServerError(f"{Path(command[0]).name} failed with exit code {done.returncode}:\n{tail(log)}")


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


def children(pid: int) -> list[int]:
    """Lists the direct children of a process."""
    return [child for child, (_, parent) in _process_table().items() if parent == pid]


def is_alive(pid: int) -> bool:
    """Tells whether the process runs; a zombie, which only waits for its parent to take note, does not."""
    state, _ = _process_table().get(pid, ("Z", 0))
    return not state.startswith("Z")


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


def _process_table() -> dict[int, tuple[str, int]]:
    """Maps each process to its state and its parent."""
    table = {}
    if sys.platform == "linux":  # where a slim image often has no `ps`
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The name before it is in parentheses and may hold spaces and parentheses of its own.
                state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue  # It ended while we were reading.
            table[int(entry.parent.name)] = (state, int(parent))
    else:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=True)
        for row in listing.stdout.splitlines():
            pid, parent, state = row.split()[:3]
            table[int(pid)] = (state, int(parent))
    return table


def _environment() -> Mapping[str, str]:
    """Returns what a server needs, no more: another account could read the rest, and PG* would change its settings."""
    kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C"}
