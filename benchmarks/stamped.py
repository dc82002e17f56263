"""A side whose tasks write stamps (`note.py`): it counts them, and times a drain by them."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path

from tests.tools.waiting import wait_until
from tests.tools.workers import Process, Processes


class Stamped(ABC):
    """A file of stamps, and perhaps the worker that writes them."""

    def __init__(self, stamps: Path) -> None:
        self.stamps = stamps
        self.stamps.touch()
        self.worker: Process | None = None

    def forget_stamps(self) -> None:
        """Count from none on."""
        os.truncate(self.stamps, 0)

    def count(self) -> int:
        """How many bodies have run."""
        return self.stamps.stat().st_size // 8

    def read_stamps(self) -> memoryview:
        """When they did, in nanoseconds."""
        return memoryview(self.stamps.read_bytes()).cast("q")

    def drained(self, count: int) -> float:
        """Have the worker go on, and return how many bodies a second it runs of those that wait."""
        assert self.worker is not None
        begun = time.monotonic_ns()
        self.worker.cont()
        wait_until(lambda: self.count() >= count, timeout=120, interval=0.01, message="all bodies to run")
        return count / (max(self.read_stamps()) - begun) * 1e9

    @property
    @abstractmethod
    def client(self) -> list[str]:
        """The program that sends for it, as `python -m` takes it; it speaks as `client.py` does."""

    @property
    @abstractmethod
    def env(self) -> dict[str, str]:
        """What a process of this side needs."""

    @abstractmethod
    def start_worker(self, processes: Processes, pool: str, concurrency: int) -> None:
        """Start a worker, and wait until it runs what it is given."""


class Watched(Stamped):
    """A side that is asked for its messages too."""

    schema: str | None = None
    """Where the rows of durable tasks are, if there are any."""

    @abstractmethod
    def waiting(self) -> int:
        """How many messages wait."""

    @abstractmethod
    def is_quiet(self) -> bool:
        """Whether there is no message, waiting or held."""

    @abstractmethod
    def forget_messages(self) -> None:
        """Delete all messages."""

    @abstractmethod
    def close(self) -> None:
        """Close what it has open; its worker is not ended."""
