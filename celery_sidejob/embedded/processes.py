"""Child processes that cannot outlive their owner, and that end within a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .account import Account
from .errors import ServerError
from .janitor import Janitor, process_table, uninterrupted

TRAMPOLINE = Path(__file__).with_name("trampoline.py")
LOG_TAIL = 4000
PAUSE_S = 0.01
GROUP_DEADLINE_S = 5.0


def spawn(
    command: Sequence[str],
    *,
    directory: Path,
    log: Path,
    account: Account | None,
    orphan_signal: signal.Signals,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start the command as a direct child that gets ``orphan_signal`` when the calling thread ends (Linux only).

    It has its own process group, so Ctrl-C in a terminal reaches only its owner, which stops it in good order.
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
    """Run a command that ends by itself, with ``text`` as its input; raises `ServerError` if it fails.

    If this is interrupted, the command ends, and every process that it has started. The signal is SIGTERM: a Postgres
    that is killed leaves its shared memory behind, and the processes that `initdb` starts end with it.
    """
    with tempfile.TemporaryFile(dir=directory) as source:  # a pipe would have to be closed after each interrupt
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
    """Send the polite signal and wait until the process ends; after the deadline kill it and its children."""
    process.send_signal(polite)
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        kill_with_children(process)


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children at once, as a power cut does, and wait until all are gone.

    If only the parent of a Postgres were killed, its children would finish their queries first, and until then no other
    Postgres could start on the same data.
    """
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # so that it starts no child between the listing and the kill
    family = [process.pid, *children(process.pid)]
    send_all(family, signal.SIGKILL)
    process.wait()
    wait_until(
        lambda: not any(is_alive(pid) for pid in family),
        deadline_s=10,
        failure=lambda: f"Processes {family} survive kill -9.",
    )


def end_group(process: subprocess.Popen[bytes], polite: signal.Signals, *, deadline_s: float) -> None:
    """End the leader of a process group, and wait until the whole group has ended; after the deadline kill the group.

    Does nothing if the leader has ended already.
    """
    if process.poll() is not None:
        return

    def others() -> list[int]:
        return [
            pid for pid, (state, _, group) in process_table().items() if group == process.pid != pid and state != "Z"
        ]

    process.send_signal(polite)
    try:
        process.wait(deadline_s)
        wait_until(lambda: not others(), deadline_s=deadline_s, failure=str)
    except (subprocess.TimeoutExpired, ServerError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not others(), deadline_s=10, failure=lambda: f"Processes {others()} survive kill -9.")


def send_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each of these processes that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def children(pid: int) -> list[int]:
    """List the direct children of a process."""
    return [child for child, (_, parent, _) in process_table().items() if parent == pid]


def is_alive(pid: int) -> bool:
    """Tell whether the process runs; a zombie does not."""
    state, _, _ = process_table().get(pid, ("Z", 0, 0))
    return state != "Z"


def wait_until(fact: Callable[[], bool], *, deadline_s: float, failure: Callable[[], str]) -> None:
    """Wait until the fact is true; raises `ServerError` with the failure's text after the deadline."""
    end_at = time.monotonic() + deadline_s
    while not fact():
        if time.monotonic() > end_at:
            raise ServerError(failure())
        time.sleep(PAUSE_S)


def tail(log: Path, *, start: int = 0) -> str:
    """Return the end of a log, from the byte ``start`` at the earliest."""
    with log.open("rb") as source:
        source.seek(max(start, log.stat().st_size - LOG_TAIL))
        return source.read().decode(errors="replace").strip()


def environment() -> Mapping[str, str]:
    """Return only the variables that a server needs: others could read more, and PG* would change its settings."""
    kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C"}
