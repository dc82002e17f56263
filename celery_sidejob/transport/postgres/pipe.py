"""A pipe by which one thread wakes another that waits for files."""

from __future__ import annotations

import os
from contextlib import suppress


class Pipe:
    """A pipe of one process; a forked copy leaves it to the parent."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self._pid = os.getpid()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._is_written = False

    def fileno(self) -> int:
        """Return what is readable once it was written."""
        return self._reading

    def write(self) -> None:
        """Wake whoever waits, or waits next; writing again before that adds nothing."""
        if not self._is_written:
            self._is_written = True
            with suppress(OSError):
                os.write(self._writing, b"\0")

    def drain(self) -> None:
        """Be unwritten; whoever has drained it looks at everything afterwards."""
        with suppress(OSError):
            os.read(self._reading, 4096)
        self._is_written = False  # after the read, which would take what is written in between, and nobody be woken

    def close(self) -> None:
        """Close both ends."""
        if self._pid != os.getpid():
            return
        self._is_written = True
        for end in (self._reading, self._writing):
            with suppress(OSError):
                os.close(end)
        self._pid = 0
