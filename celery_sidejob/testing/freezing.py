"""Processes that neither run nor die: SIGSTOP for a whole group."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable

from ..embedded.processes import process_table
from .waiting import wait_until

STOPPED = "T"
DEAD = ("Z", "X")


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


def family(pid: int) -> list[int]:
    """Return the process and its descendants that are alive; none if the process is gone."""
    table = {number: entry for number, entry in process_table().items() if entry[0] not in DEAD}
    found = [pid] if pid in table else []
    for member in found:
        found += [child for child, (_, parent, _) in table.items() if parent == member]
    return found


def session(leader: int) -> list[int]:
    """Return the live processes of the session that a process has begun, even if that process is gone."""
    table = process_table()
    return [pid for pid, (state, _, _) in table.items() if state not in DEAD and _session_of(pid) == leader]


def send_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each of these processes that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None
