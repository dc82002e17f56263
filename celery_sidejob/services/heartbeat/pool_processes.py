"""The processes of a worker's pool, watched by their parent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Set

ENDS_OF_PLAN = frozenset({0, 0x9B})
"""Exit codes of a pool process that ended as planned: it was finished, or is to be replaced (billiard's EX_RECYCLE)."""


class PoolProcesses:
    """Notices the death of child processes without reaping them, and has their pool replace them at once."""

    def __init__(self, pids: Callable[[], Iterable[int]] = tuple, replace: Callable[[], None] = lambda: None) -> None:
        self._pids = pids
        self._replace = replace
        self._known: set[int] = set()
        self._ended: set[int] = set()

    def died(self, busy: Set[int] = frozenset()) -> list[int]:
        """Return the processes that died since the last look, either unexpectedly or while they were `busy`.

        A busy process may have started and ended between two looks, and its pool may have forgotten it already.
        """
        listed = (set(self._pids()) | busy) - {os.getpid()}
        self._ended &= listed  # a dead process stays listed until its pool looks
        self._known |= listed - self._ended
        died = []
        for pid in sorted(self._known):
            end = _end_of(pid)
            if end is not None:
                self._known.discard(pid)
                self._ended.add(pid)
                if end not in ENDS_OF_PLAN or pid in busy:
                    died.append(pid)
        if died:
            self._replace()
        return died


def _end_of(pid: int) -> int | None:
    """Return None for a running process, else its exit code or the negative number of the signal that killed it."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return -1  # its pool reaped it first, and the reason of its end is unknown
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
