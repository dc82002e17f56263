"""What happens to the workers of a storm."""

from __future__ import annotations

import enum


class Accident(enum.Enum):
    """What can happen."""

    KILLED = "killed while it ran"
    KILLED_STARTING = "killed while it started"
    KILLED_STOPPED = "stopped, and killed"
    SESSION = "session ended"
    RESTART = "Postgres killed"
    FREEZE = "stood still"
    SILENCE = "network silent"

    @property
    def kills(self) -> bool:
        """Whether a worker is killed."""
        return self in (Accident.KILLED, Accident.KILLED_STARTING, Accident.KILLED_STOPPED)
