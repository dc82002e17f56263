"""Processes that neither run nor die: SIGSTOP for all that belong together."""

from collections.abc import Iterator
from contextlib import contextmanager

from celery_sidejob.embedded.janitor import process_table
from celery_sidejob.embedded.processes import is_alive, send_all
from celery_sidejob.testing.processes import DEAD, freeze, thaw

__all__ = ["family", "freeze", "frozen", "is_alive", "send_all", "thaw"]


def family(pid: int) -> list[int]:
    """The process and its descendants that are alive; none if the process is gone."""
    table = {number: entry for number, entry in process_table().items() if entry[0] not in DEAD}
    found = [pid] if pid in table else []
    for member in found:
        found += [child for child, (_, parent, _) in table.items() if parent == member]
    return found


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Within the block the process and its descendants stand still: a server that accepts and never answers."""
    freeze(lambda: family(pid))
    try:
        yield
    finally:
        thaw(lambda: family(pid))
