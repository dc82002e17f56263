"""Kills the processes of a test run whose own process is gone.

PR_SET_PDEATHSIG would not do: it reaches only the process we started and not what that has forked, it fires when a
thread ends, and setting it takes Python code between fork and exec, where a test run with threads may deadlock. So a
guard waits on a pipe that only our end keeps open. Then it removes the directory for temporary files that it has given
them: a process that is killed leaves its own behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self


class Guard:
    """A process that outlives us just long enough to kill each process group we have not taken from it."""

    def __init__(self) -> None:
        self.temporary = tempfile.mkdtemp(prefix="sidejob-tests-")
        """The directory for temporary files of what it watches."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.temporary],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the test run, which ends its processes itself
        )
        assert self._process.stdin is not None
        self._orders = self._process.stdin

    def watch(self, group: int) -> None:
        """Kill this process group if we die."""
        self._order("watch", group)

    def forget(self, group: int) -> None:
        """Leave this process group alone: it is gone, and its number may be given to another one."""
        self._order("forget", group)

    def close(self) -> None:
        """End the guard, which kills what it still watches; `with` does this."""
        self._orders.close()
        self._process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, verb: str, group: int) -> None:
        self._orders.write(f"{verb} {group}\n".encode())
        self._orders.flush()


def main() -> None:
    """Follow the orders on standard input; at its end kill what is still watched, and remove the directory."""
    watched: set[int] = set()
    for order in sys.stdin:
        verb, group = order.split()
        if verb == "watch":
            watched.add(int(group))
        else:
            watched.discard(int(group))
    for number in watched:
        try:
            os.killpg(number, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
