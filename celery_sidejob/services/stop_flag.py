"""One byte shared by a worker and the processes it forks: whether the worker wants to stop."""

from __future__ import annotations

import mmap

_flag: mmap.mmap | None = None


def share() -> None:
    """Make the byte; the worker's parent calls this before its pool forks."""
    global _flag
    if _flag is None:
        _flag = mmap.mmap(-1, 1)


def announce() -> None:
    """Set the byte: the worker stops. Safe inside a signal handler."""
    if _flag is not None:
        _flag[0] = 1


def worker_is_stopping() -> bool:
    """Tell whether the worker has begun to stop; False in a spawned pool process, which cannot know."""
    return _flag is not None and _flag[0] == 1
