"""The processes of a worker's pool, watched by their parent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Set
from typing import NamedTuple, Protocol

ENDS_OF_PLAN = frozenset({0, 0x9B})
"""Exit codes of a pool process that ended as planned: it was finished, or is to be replaced (billiard's EX_RECYCLE)."""


class Process(Protocol):
    """A process as its pool knows it."""

    @property
    def pid(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...


class PoolProcesses:
    """Notices the death of child processes without reaping them, and has their pool replace them at once."""

    def __init__(
        self, listed: Callable[[], Iterable[Process]] = tuple, replace: Callable[[], None] = lambda: None
    ) -> None:
        self._listed = listed
        self._replace = replace
        self._known: dict[int, Process | None] = {}
        self._ended: set[int] = set()

    def died(self, busy: Set[int] = frozenset()) -> Mapping[int, int | None]:
        """Return the processes that died since the last look, either unexpectedly or while they were `busy`.

        The value is its exit code, the negative number of the signal that killed it, or None if that is not known. A
        busy process may have started and ended between two looks, and its pool may have forgotten it already.
        """
        listed = {**dict.fromkeys(busy), **{process.pid: process for process in self._listed()}}
        listed.pop(os.getpid(), None)
        self._ended &= listed.keys()  # a dead process stays listed until its pool looks
        for pid, process in listed.items():
            if pid not in self._ended and not self._known.get(pid):
                self._known[pid] = process
        died: dict[int, int | None] = {}
        for pid, process in sorted(self._known.items()):
            if (ended := _end_of(pid, process)) is not None:
                del self._known[pid]
                self._ended.add(pid)
                if ended.status not in ENDS_OF_PLAN or pid in busy:
                    died[pid] = ended.status
        if died:
            self._replace()
        return died


class _Ended(NamedTuple):
    status: int | None
    """Its exit code, or the negative number of the signal that killed it; None if its pool has forgotten it."""


def _end_of(pid: int, process: Process | None) -> _Ended | None:
    """Return how a process ended; None for a running process."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return _Ended(None if process is None else process.exitcode)  # its pool has reaped it first
    if ended is None:
        return None
    return _Ended(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
