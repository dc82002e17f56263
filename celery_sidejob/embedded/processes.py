"""Processes of servers: started, found, and ended within a deadline; the error of one that does not start."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from .janitor import process_table

TRAMPOLINE = Path(__file__).with_name("trampoline.py")
LOG_TAIL = 4000
PAUSE_S = 0.01
GROUP_DEADLINE_S = 5.0


class ServerError(RuntimeError):
    """A throwaway server was not found, did not start, or is not running. The message contains the end of its log."""


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


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the leader of a process group, and wait until the whole group has ended; after the deadline kill the group.

    Does nothing if the leader has ended already. The signal is SIGTERM: a Postgres that is killed leaves its shared
    memory behind, and the processes that `initdb` starts end with it.
    """
    if process.poll() is not None:
        return

    def others() -> list[int]:
        return [
            pid for pid, (state, _, group) in process_table().items() if group == process.pid != pid and state != "Z"
        ]

    process.terminate()
    try:
        process.wait(GROUP_DEADLINE_S)
        wait_until(lambda: not others(), deadline_s=GROUP_DEADLINE_S, failure=str)
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
