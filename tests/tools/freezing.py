"""Processes that neither run nor die: SIGSTOP for all that belong together."""

from collections.abc import Iterator
from contextlib import contextmanager

from celery_sidejob.embedded.processes import is_alive
from celery_sidejob.testing.processes import family, freeze, send_all, thaw

__all__ = ["family", "freeze", "frozen", "is_alive", "send_all", "thaw"]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Within the block the process and its descendants stand still: a server that accepts and never answers."""
    freeze(lambda: family(pid))
    try:
        yield
    finally:
        thaw(lambda: family(pid))
