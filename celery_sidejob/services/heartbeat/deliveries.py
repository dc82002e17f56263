"""What runs in this worker: which deliveries it was given, which process runs each, and which are over."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ...model import native

Key = tuple[int, int]
"""(job id, run number)"""
K = TypeVar("K", bound=tuple[Any, int])
"""What a run is told by: of a job, or of an ordinary task (task id, generation)."""

GRACE_S = 5.0
"""How long a run that is over here may still be held in the store, before it is rescued."""
LEFT_S = 3600.0
"""How long a store that did not answer may take to lock a run which then was not begun."""


ENDED = "ended"
"""The worker stops the run's process and ends the run itself: a time limit struck, or the asking was revoked."""
RELEASED = "released"
"""The worker stops the run's process because it stops itself."""


@dataclass(eq=False, slots=True)
class Delivery(Generic[K]):
    """One delivery to this worker. There may be several of one run: all but one find it claimed and end at once."""

    key: K
    lease_s: float | None = None
    pid: int | None = None
    over_at: float | None = None
    plan: str | None = None
    idle: bool = False
    """It runs nothing: it was a copy, or its store did not answer."""
    received_at: float = field(default_factory=time.monotonic)
    request: Callable[[], object] | None = None
    """Returns the request itself while there is one: Celery drops some without a word."""
    locks_late: bool = False
    """Its run may begin without a lock: until it has one, this worker vouches for its message."""
    vouched_at: float | None = None
    """When the store was told last that it waits here."""


class Deliveries(Generic[K]):
    """The parent's knowledge of its runs, filled by the hooks of each request; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = native.lock()
        self._deliveries: dict[K, list[Delivery[K]]] = {}
        self._dropped: frozenset[K] = frozenset()
        """What this worker had last time it was declared dead."""
        self._left: dict[tuple[K, int], float] = {}
        """Runs that processes did not begin, as the store did not answer, and since when: it may lock them yet."""
        self._missed: set[K] = set()
        """Those of them whose message nobody has any more."""

    def received(self, key: K, lease_s: float | None = None, *, request: object = None) -> Delivery[K]:
        """A delivery was received; its run may begin at any time, and with `lease_s` renews its own lease."""
        delivery = Delivery(key, lease_s, request=None if request is None else weakref.ref(request))
        with self._lock:
            self._deliveries.setdefault(key, []).append(delivery)
        return delivery

    def accepted(self, delivery: Delivery[K], pid: int | None) -> None:
        """A process of the pool begins with the delivery, which may have been thought lost with the connection."""
        with self._lock:
            delivery.pid = pid
            of_run = self._deliveries.setdefault(delivery.key, [])
            if delivery not in of_run:
                of_run.append(delivery)

    def over(self, delivery: Delivery[K]) -> None:
        """The delivery is over, whatever came of it."""
        with self._lock:
            delivery.over_at = time.monotonic()
            if not delivery.idle:
                self._left.pop(_place(delivery), None)

    def idle(self, delivery: Delivery[K]) -> None:
        """The delivery runs nothing."""
        with self._lock:
            delivery.idle = True

    def left(self, delivery: Delivery[K], *, again: bool) -> None:
        """The delivery began no run, as the store did not answer; `again`: its message is nowhere any more."""
        with self._lock:
            self._left[_place(delivery)] = time.monotonic()
            if again:
                self._missed.add(delivery.key)

    def is_left(self, key: K, pid: int) -> bool:
        """Tell whether a process that is said to hold a run has not begun it, nor since: the lock came too late."""
        with self._lock:
            may_run = any(delivery.pid == pid and not delivery.idle for delivery in self._deliveries.get(key, ()))
            return (key, pid) in self._left and not may_run

    def missed(self) -> list[K]:
        """Return the runs whose message was forgotten here, each once."""
        if not self._missed:
            return []
        with self._lock:
            missed, self._missed = self._missed, set()
        return sorted(missed)

    def stopped(self, key: K) -> None:
        """The worker has stopped the run: all its deliveries are over."""
        with self._lock:
            for delivery in self._deliveries.get(key, ()):
                delivery.over_at = time.monotonic()

    def planned(self, key: K, plan: str) -> None:
        """The worker is about to stop the run's process, with `ENDED` or `RELEASED` in mind."""
        with self._lock:
            for delivery in self._deliveries.get(key, ()):
                delivery.plan = plan

    def plan_of(self, key: K) -> str | None:
        """Return why the worker stops the run's process; None if it does not, so that its death is a loss."""
        with self._lock:
            return next((delivery.plan for delivery in self._deliveries.get(key, ()) if delivery.plan), None)

    def busy(self) -> set[int]:
        """Return the processes that have a delivery which is not over, as far as is known here."""
        with self._lock:
            return {delivery.pid for delivery in self._all() if delivery.pid and delivery.over_at is None}

    def of_process(self, pid: int) -> list[K]:
        """Return the runs, and forget the deliveries, that a process which has died had been given."""
        with self._lock:
            gone = [delivery for delivery in self._all() if delivery.pid == pid and delivery.over_at is None]
            self._forget(gone)
            for delivery in gone:
                self._left.pop(_place(delivery), None)
        return [delivery.key for delivery in gone]

    def unlocked(self, pid: int | None = None) -> list[K]:
        """Return the runs that may have begun without a lock, here or in one process, and that are not ended here."""
        with self._lock:
            found = [
                delivery
                for delivery in self._all()
                if delivery.locks_late and delivery.over_at is None and delivery.pid and delivery.plan != ENDED
            ]
        return sorted({delivery.key for delivery in found if pid is None or delivery.pid == pid})

    def waiting(self, *, for_s: float, every_s: float) -> list[K]:
        """Return the runs whose delivery waits here for a process or a lock, and note that they are vouched for now.

        Those that have waited for `for_s` seconds, and were not returned in the last `every_s`.
        """
        now = time.monotonic()
        with self._lock:
            found = [
                delivery
                for delivery in self._all()
                if (delivery.pid is None or delivery.locks_late)
                and delivery.over_at is None
                and (delivery.request is None or delivery.request() is not None)
                and now - delivery.received_at >= for_s
                and (delivery.vouched_at is None or now - delivery.vouched_at >= every_s)
            ]
            for delivery in found:
                delivery.vouched_at = now
        return sorted({delivery.key for delivery in found})

    def disconnected(self) -> None:
        """Forget what waits: the worker drops it with its connection, and the broker gives it to somebody again."""
        with self._lock:
            self._forget([one for one in self._all() if one.pid is None and one.over_at is None])

    def own_leases(self) -> dict[Any, float]:
        """Return the runs that renew their own lease, {job id: seconds}."""
        with self._lock:
            return {
                delivery.key[0]: delivery.lease_s
                for delivery in self._all()
                if delivery.lease_s is not None and delivery.pid is not None and delivery.over_at is None
            }

    def knows(self, key: K) -> bool:
        """Tell whether the run may still be under way here, or has only just ended."""
        with self._lock:
            return any(
                delivery.over_at is None or time.monotonic() - delivery.over_at < GRACE_S
                for delivery in self._deliveries.get(key, ())
            )

    def is_over(self, key: K) -> bool:
        """Tell whether a run of this worker is over: it was stopped, or the worker was declared dead meanwhile."""
        with self._lock:
            found = self._deliveries.get(key, ())
            return key in self._dropped or bool(found and all(delivery.over_at is not None for delivery in found))

    def sweep(self) -> None:
        """Forget deliveries that are over for longer than `GRACE_S`."""
        now = time.monotonic()
        with self._lock:
            self._forget([old for old in self._all() if old.over_at is not None and now - old.over_at >= GRACE_S])
            self._left = {place: since for place, since in self._left.items() if now - since < LEFT_S}

    def clear(self) -> list[K]:
        """Forget everything, and return what was not over: this worker was declared dead, its runs are refused."""
        with self._lock:
            left = [delivery.key for delivery in self._all() if delivery.over_at is None]
            self._dropped = frozenset(left)
            self._deliveries.clear()
            self._left.clear()
        return left

    def _all(self) -> list[Delivery[K]]:
        return [delivery for deliveries in self._deliveries.values() for delivery in deliveries]

    def _forget(self, gone: list[Delivery[K]]) -> None:
        for delivery in gone:
            of_run = self._deliveries[delivery.key]
            of_run.remove(delivery)
            if not of_run:
                del self._deliveries[delivery.key]


def _place(delivery: Delivery[K]) -> tuple[K, int]:
    """Return which run a delivery was of, and which process had it."""
    return delivery.key, delivery.pid or 0
