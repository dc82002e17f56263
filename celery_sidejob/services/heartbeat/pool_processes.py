"""The processes of a worker's pool, watched by their parent; and the kernel's kills for lack of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

ENDS_OF_PLAN = frozenset({0, 0x9B})
"""Exit codes of a pool process that ended as planned: it was finished, or is to be replaced (billiard's EX_RECYCLE)."""


LONGEST_S = 2.0
"""After this time a death is told in any case: the pool's thread has something else to do."""


class Process(Protocol):
    """A process as its pool knows it."""

    @property
    def pid(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...


class PoolProcesses:
    """Notices the death of child processes without reaping them, and has their pool replace them at once.

    A death is told when the pool has read what the process had written before: which run it had begun, and how the last
    one has ended.
    """

    def __init__(
        self, listed: Callable[[], Iterable[Process]] = tuple, replace: Callable[[], None] | None = None
    ) -> None:
        """`replace` has the pool look after its processes soon; it then calls `pool_has_looked`."""
        self._listed = listed
        self._replace = replace
        self._known: dict[int, Process | None] = {}
        self._ended: set[int] = set()
        self._looks = 0
        self._unread: dict[int, _Unread] = {}

    def pool_has_looked(self) -> None:
        """Note that the pool has read all that its ended processes have left; by its own thread."""
        self._looks += 1

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
        for pid, process in sorted(self._known.items()):
            if (ended := _end_of(pid, process)) is not None:
                del self._known[pid]
                self._ended.add(pid)
                if ended.status not in ENDS_OF_PLAN or pid in busy:
                    self._unread[pid] = _Unread(ended.status, self._looks, time.monotonic())
                    if self._replace is not None:
                        self._replace()
        died = {pid: one.status for pid, one in self._unread.items() if self._replace is None or self._was_read(one)}
        for pid in died:
            del self._unread[pid]
        return died

    def _was_read(self, one: _Unread) -> bool:
        return self._looks > one.looks or time.monotonic() - one.since > LONGEST_S


class _Unread(NamedTuple):
    """A death that is not told yet."""

    status: int | None
    looks: int
    since: float


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


WITHIN_S = 10.0
"""Seconds for which a kill for lack of memory counts as one that has just happened: several beats."""
GROUP = Path("/proc/self/cgroup")
HOST = Path("/proc/vmstat")
"""It counts the kills of the whole host; read where no control group counts them."""
MOUNTS = {"": ("/sys/fs/cgroup", "memory.events"), "memory": ("/sys/fs/cgroup/memory", "memory.oom_control")}
"""Where the groups of a hierarchy are, and the file that counts, by its controller; "" is version 2."""


class MemoryKills:
    """Watches how many processes the kernel has killed for lack of memory: this worker's control group counts them."""

    def __init__(self, read: Callable[[], int | None] | None = None) -> None:
        self._read = read or (lambda: kills_in(kill_counters()))
        self._number = self._read()
        self._rose_at = float("-inf")

    def look(self) -> None:
        """Note whether there were more kills since the last look."""
        number = self._read()
        if number is not None and self._number is not None and number > self._number:
            self._rose_at = time.monotonic()
        self._number = number

    def were_just_now(self) -> bool | None:
        """Look, and tell whether a process was just killed for want of memory; None if nothing can be read."""
        self.look()
        return None if self._number is None else time.monotonic() - self._rose_at < WITHIN_S


def kill_counters() -> list[Path]:
    """Return the files that may count: of this process' group, then of the outermost that it sees, then of the host."""
    found = []
    with suppress(OSError, ValueError):
        for line in GROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mount = next((MOUNTS[one] for one in controllers.split(",") if one in MOUNTS), None)
            if mount is not None:
                # In a container the path may be that of the host, and the mount point is the group itself.
                found += [Path(mount[0], path.lstrip("/"), mount[1]), Path(*mount)]
    return [*found, HOST]


def kills_in(paths: Iterable[Path]) -> int | None:
    """Return the number of kills in the first of these files that counts them; None if none does."""
    for path in paths:
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return None
