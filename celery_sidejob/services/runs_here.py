"""What runs in this worker: which deliveries it was given, which process runs each, and which are over."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

Key = tuple[int, int]
"""(job id, run number)"""

GRACE_S = 5.0
"""How long a run that is over here may still be held in the store, before it is given back."""


@dataclass(slots=True)
class _Entry:
    pid: int | None = None
    lease_s: float | None = None
    over_at: float | None = None


class RunsHere:
    """The parent's knowledge of its runs, filled by the hooks of each request; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry] = {}

    def received(self, key: Key, lease_s: float | None = None) -> None:
        """A delivery was received; its run may begin at any time, and with `lease_s` renews its own lease."""
        with self._lock:
            self._entries[key] = _Entry(lease_s=lease_s)

    def accepted(self, key: Key, pid: int | None) -> None:
        """A process of the pool begins the run."""
        with self._lock:
            self._entries.setdefault(key, _Entry()).pid = pid

    def over(self, key: Key) -> None:
        """The run is over, whatever came of it."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.over_at = time.monotonic()

    def of_process(self, pid: int) -> list[Key]:
        """Return, and forget, the runs that a process which has died had been given."""
        with self._lock:
            gone = [key for key, entry in self._entries.items() if entry.pid == pid and entry.over_at is None]
            for key in gone:
                del self._entries[key]
        return gone

    def own_leases(self) -> dict[int, float]:
        """Return the runs that renew their own lease, {job id: seconds}."""
        with self._lock:
            return {
                job_id: entry.lease_s
                for (job_id, _), entry in self._entries.items()
                if entry.lease_s is not None and entry.pid is not None and entry.over_at is None
            }

    def knows(self, key: Key) -> bool:
        """Tell whether the run may still be under way here, or has only just ended."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and (entry.over_at is None or time.monotonic() - entry.over_at < GRACE_S)

    def sweep(self) -> None:
        """Forget runs that are over for longer than `GRACE_S`."""
        now = time.monotonic()
        with self._lock:
            old = [key for key, entry in self._entries.items() if entry.over_at and now - entry.over_at >= GRACE_S]
            for key in old:
                del self._entries[key]

    def clear(self) -> None:
        """Forget everything: this worker was declared dead, its runs are refused."""
        with self._lock:
            self._entries.clear()
