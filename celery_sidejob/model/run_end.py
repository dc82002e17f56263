"""The ways in which a run ends, of a job and of an ordinary durable task."""

from __future__ import annotations

from enum import StrEnum


class RunEnd(StrEnum):
    """How a run ended, whoever ended it."""

    COMPLETED = "completed"
    SUSPENDED = "suspended"
    FAILED = "failed"
    RETRIED = "retried"
    """It raised, and will be tried again."""
    TERMINATED = "terminated"
    """It was the shutdown of its job."""
    LOST = "lost"
    """Its worker died, or gave it up because the store was unavailable."""
    GIVEN_BACK = "given back"
    """Its worker stops, or cannot run it after all. This is not a loss."""
