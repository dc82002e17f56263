"""Processes that neither run nor die: SIGSTOP for all that belong together."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator

from ..embedded.processes import process_table
from .waiting import wait_until

STOPPED = "T"
DEAD = ("Z", "X")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Within the block the process and its descendants stand still: a server that accepts and never answers."""
    freeze(lambda: family(pid))
    try:
        yield
    finally:
        thaw(lambda: family(pid))


def freeze(find: Callable[[], Iterable[int]]) -> None:
    """Stop all processes that `find` returns, with those made meanwhile; when this returns they stand still."""

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
    """Return what is alive of the session that a process has begun, whether or not that process is."""
    table = process_table()
    return [pid for pid, (state, _, _) in table.items() if state not in DEAD and _session_of(pid) == leader]


def is_alive(pid: int) -> bool:
    """Tell whether the process exists and is not a zombie."""
    return process_table().get(pid, DEAD)[0] not in DEAD


def send_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each of these processes that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None
