"""Stores the counts of a worker's process once it is quiet, and the queues and tasks that the worker serves.

A busy process stores its counts by itself, between two transactions (`store/measured.py`). The recorder stores the last
counts before the process became idle, while its connection is still open. An idle process stores nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from ..model.logger import logger
from ..operations import waiting
from ..store import registry
from ..store.measured import EVERY_S, MeasuredConnections

LOOK_S = 1.0
QUIET_S = 2.0
"""Shorter than an idle connection is kept, so that no connection is opened for this."""
BUSY_S = 1.5 * EVERY_S

Served = tuple[int, Sequence[str], Sequence[str]]
Stood = tuple[float, str]
"""When an event loop stood still, by the clock `time.monotonic`, and where."""

AGAIN_S = 600.0
"""Seconds after which a worker records its queues and tasks again: its clock may have gone wrong since."""


class Recorder:
    """Records for one process of a worker.

    `served` returns (worker id, queues, tasks) of its parent, or None; `stood` when its event loop last stood still.
    """

    name = "recorder"

    def __init__(
        self,
        connections: MeasuredConnections,
        served: Callable[[], Served | None] = lambda: None,
        stood: Callable[[], Stood | None] = lambda: None,
    ) -> None:
        self._connections = connections
        self._served = served
        self._stood = stood
        self._told: Stood | None = None
        self._noted: Served | None = None
        self._noted_at = 0.0
        connections.measures.begin()

    def run_once(self) -> bool:
        """Store the counts if nothing has been counted for a moment; returns whether anything was stored.

        A process that runs only durable tasks makes no transaction after which it would store its counts itself.
        """
        self._note_what_is_served()
        self._note_where_it_stood()
        measures = self._connections.measures
        if measures.quiet_s < QUIET_S and measures.age_s < BUSY_S:
            return False
        return self._connections.record()

    def wait_s(self) -> float:
        """Return the seconds to wait."""
        return LOOK_S

    def close(self) -> None:
        """Store the remaining counts, because the process ends."""
        self._connections.record()

    def _note_what_is_served(self) -> None:
        """Store the queues and tasks that this worker serves, whenever they or its identity have changed."""
        found = self._served()
        recent = time.monotonic() - self._noted_at < AGAIN_S
        if found is None or (found == self._noted and recent):
            return
        worker_id, queues, tasks = found
        serve = partial(waiting.serve, worker_id=worker_id, queues=queues, tasks=tasks)
        released = self._connections.transact("serve", serve)
        runs = released.runs
        while released.goes_on:
            released = self._connections.transact("serve", serve)
            runs += released.runs
        if runs:
            logger.info("%d runs go on that were parked: this worker knows their tasks", runs)
        self._noted, self._noted_at = found, time.monotonic()

    def _note_where_it_stood(self) -> None:
        """Store where the event loop of this worker last stood still, for `doctor`."""
        found = self._stood()
        if found is None or found == self._told or self._noted is None:
            return
        at, where = found
        note = partial(registry.note_stand, worker_id=self._noted[0], where=where, ago_s=time.monotonic() - at)
        self._connections.transact("serve", note, single=True)
        self._told = found
