"""Stores what a worker's process has counted, when it has become quiet, and which queues and tasks the worker serves.

A busy process stores by itself, between two transactions (`store/measured.py`). This is for what came last before it
had nothing to do, while its connection is still open; an idle process stores nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ..store import served
from ..store.measured import MeasuredConnections
from ..store.statement import Transaction

logger = logging.getLogger("celery_sidejob")

LOOK_S = 1.0
QUIET_S = 2.0
"""Shorter than an idle connection is kept, so that none is opened for this."""

Served = tuple[int, Sequence[str], Sequence[str]]

AGAIN_S = 600.0
"""How often a worker says again what it serves: its clock may have gone wrong since."""


class Recorder:
    """Records for one process of a worker; `served` is what its parent serves: (worker id, queues, tasks), or None."""

    name = "recorder"

    def __init__(self, connections: MeasuredConnections, served: Callable[[], Served | None] = lambda: None) -> None:
        self._connections = connections
        self._served = served
        self._noted: Served | None = None
        self._noted_at = 0.0
        connections.measures.begin()

    def run_once(self) -> bool:
        """Store what there is, if nothing has been counted for a moment; tells whether anything was stored."""
        self._note_what_is_served()
        if self._connections.measures.quiet_s < QUIET_S:
            return False
        return self._connections.record()

    def wait_s(self) -> float:
        """Return how long to wait."""
        return LOOK_S

    def close(self) -> None:
        """Store what is left: the process ends."""
        self._connections.record()

    def _note_what_is_served(self) -> None:
        """Write down which queues and tasks this worker serves, whenever that has changed, or its identity has."""
        found = self._served()
        recent = time.monotonic() - self._noted_at < AGAIN_S
        if found is None or (found == self._noted and recent):
            return
        worker_id, queues, tasks = found

        def serve(executor: Transaction) -> None:
            served.serve(executor, worker_id, queues=queues, tasks=tasks)

        self._connections.transact("serve", serve)
        self._noted, self._noted_at = found, time.monotonic()
