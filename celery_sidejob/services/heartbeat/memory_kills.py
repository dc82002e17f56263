"""Whether the kernel has just killed a process for lack of memory: this worker's control group counts such kills."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

WITHIN_S = 10.0
"""Seconds for which a kill counts as one that has just happened: several beats."""
GROUP = Path("/proc/self/cgroup")
HOST = Path("/proc/vmstat")
"""It counts the kills of the whole host; read where no control group counts them."""
MOUNTS = {"": ("/sys/fs/cgroup", "memory.events"), "memory": ("/sys/fs/cgroup/memory", "memory.oom_control")}
"""Where the groups of a hierarchy are, and the file that counts, by its controller; "" is version 2."""


class MemoryKills:
    """Watches the number of such kills."""

    def __init__(self, read: Callable[[], int | None] | None = None) -> None:
        self._read = read or (lambda: count(files()))
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


def files() -> list[Path]:
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


def count(paths: Iterable[Path]) -> int | None:
    """Return the number of kills in the first of these files that counts them; None if none does."""
    for path in paths:
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return None
