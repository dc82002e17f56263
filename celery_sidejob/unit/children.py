"""The stored children of a run's job, as its body sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..operations.hold import Hold
from ..operations.runtime import Runtime
from ..store import jobs


class Children:
    """The same children until the run's first commit, then those that the store has.

    A body that sees a child's end sees all ends that need no further run, and no other. Very many children are read
    when the body first asks for them all: it misses no end, and may see one for which a further run is owed. A
    shutdown reads them as they are.
    """

    def __init__(self, runtime: Runtime, hold: Hold) -> None:
        self._runtime = runtime
        self._hold = hold
        self._rows: Sequence[Any] | None = hold.children
        self._are_first = hold.kind == "run"

    def begin_next(self) -> None:
        """Read them anew from now on: a unit was committed."""
        self._rows, self._are_first = None, False

    def all(self) -> Sequence[Any]:
        """Return their rows, oldest first."""
        if self._rows is not None:
            return self._rows
        found = jobs.children(self._runtime.connections, self._hold.job_id)
        if self._are_first:
            self._rows = found
        return found

    def find(self, parent_id: int, name: str) -> tuple[int, Any] | None:
        """Return the id of a child of this job or another, and its row if that was read already; None without one."""
        if parent_id == self._hold.job_id and self._rows is not None:
            return next(((row.id, row) for row in self._rows if row.name == name), None)
        child_id = jobs.child(self._runtime.connections, parent_id, name)
        return None if child_id is None else (child_id, None)
