"""Processes that neither run nor die: SIGSTOP for all that belong together."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator

import psutil

from tests.tools.waiting import wait_until


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Within the block the process and its descendants stand still: a server that accepts and never answers."""
    freeze(lambda: family(pid))
    try:
        yield
    finally:
        thaw(lambda: family(pid))


def freeze(find: Callable[[], Iterable[int]]) -> None:
    """Stop all processes that `find` returns; when this returns they stand still, those made meanwhile too."""

    def all_stopped() -> bool:
        moving = [pid for pid in find() if _status(pid) != psutil.STATUS_STOPPED]
        send_all(moving, signal.SIGSTOP)
        return not moving

    wait_until(all_stopped, message="all processes to stand still")


def thaw(find: Callable[[], Iterable[int]]) -> None:
    """Let all processes that `find` returns go on."""
    send_all(find(), signal.SIGCONT)


def family(pid: int) -> list[int]:
    """The process and its descendants, without zombies; empty when it is gone."""
    try:
        parent = psutil.Process(pid)
        members = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [member.pid for member in members if is_alive(member.pid)]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    return _status(pid) not in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def send_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each of these processes that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _status(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None
