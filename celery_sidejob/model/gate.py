"""The gates: why a message waits although it may be due."""

from __future__ import annotations

from enum import IntEnum


class Gate(IntEnum):
    """The gate at which a message waits. Up to `QUEUE` its run is owed once it is due, above that it is not."""

    OPEN = 0
    """It waits at no gate."""
    QUEUE = 1
    """A managed queue had no room for a run: the message that was sent has gone by, until the queue lets one in."""
    POOL = 2
    """Its capacity pool has no slots for it."""
    WORKER = 3
    """It is parked: no worker of its queue knows the task."""
    JOBS = 4
    """Its job waits for other jobs."""
