"""The deliveries of this worker: which it has received, which process runs each, and which are over."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ...model import native

K = TypeVar("K", bound=tuple[Any, int])
"""The key of a run: (job id, run number), or for an ordinary task (task id, generation)."""

GRACE_S = 5.0
"""Seconds for which the store may still hold a run that is over here; after that the run is rescued."""
LEFT_S = 3600.0
"""Seconds within which a silent store may still apply the lock of a run that was then not begun."""


ENDED = "ended"
"""The worker stops the run's process and ends the run itself: a time limit was reached, or the asking was revoked."""
RELEASED = "released"
"""The worker stops the run's process because the worker itself is stopping."""


@dataclass(eq=False, slots=True)
class Delivery(Generic[K]):
    """One delivery to this worker. One run may have several: all but one find the run claimed and end at once."""

    key: K
    lease_s: float | None = None
    pid: int | None = None
    over_at: float | None = None
    plan: str | None = None
    idle: bool = False
    """The delivery runs nothing: it was a copy, or its store did not answer."""
    received_at: float = field(default_factory=time.monotonic)
    request: Callable[[], object] | None = None
    """Return the request, or None if it is gone: Celery drops some requests without telling anyone."""
    held: Any = None
    """A task's `Held` or a job's `Claimed`, if this worker has held its row before the run begins."""
    vouched_at: float | None = None
    """When the store was last told that the delivery waits here."""


class Deliveries(Generic[K]):
    """The runs known to the worker's parent, filled in by the hooks of each request; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = native.lock()
        self._deliveries: dict[K, list[Delivery[K]]] = {}
        self._dropped: frozenset[K] = frozenset()
        """The runs that this worker had when it was last declared dead."""
        self._left: dict[tuple[K, int], float] = {}
        """Runs not begun because the store did not answer, and since when: the store may still apply their locks."""
        self._missed: set[K] = set()
        """The runs among them whose messages are to be sent again."""

    def received(self, key: K, lease_s: float | None = None, *, request: object = None) -> Delivery[K]:
        """Note a delivery. Its run may begin at any time; with `lease_s` the run renews its own lease."""
        delivery = Delivery(key, lease_s, request=None if request is None else weakref.ref(request))
        with self._lock:
            self._deliveries.setdefault(key, []).append(delivery)
        return delivery

    def accepted(self, delivery: Delivery[K], pid: int | None) -> None:
        """Note that a pool process begins the delivery, even one that was forgotten when the connection broke."""
        with self._lock:
            delivery.pid = pid
            of_run = self._deliveries.setdefault(delivery.key, [])
            if delivery not in of_run:
                of_run.append(delivery)

    def turned(self, named: K, run: K) -> None:
        """Note that a delivery of one run, in a thread of this process, works on another: it was a permit."""
        with self._lock:
            begun = [each for each in self._deliveries.get(named, ()) if each.pid is not None and each.over_at is None]
            self._turn(begun[:1], run)

    def turned_in(self, runs: Mapping[int, K]) -> None:
        """Note on which run each process of the pool works, {process: run}, if not on what its delivery names."""
        if not runs:
            return
        with self._lock:
            for pid, run in runs.items():
                self._turn([each for each in self._all() if each.pid == pid and each.over_at is None], run)

    def over(self, delivery: Delivery[K]) -> None:
        """Note that the delivery is over, whatever its outcome."""
        with self._lock:
            delivery.over_at = time.monotonic()
            if not delivery.idle:
                self._left.pop(_run_in_process(delivery), None)

    def idle(self, delivery: Delivery[K]) -> None:
        """Note that the delivery runs nothing."""
        with self._lock:
            delivery.idle = True

    def left(self, delivery: Delivery[K]) -> None:
        """Note that the delivery began no run as the store did not answer, and that its message is forgotten."""
        with self._lock:
            self._left[_run_in_process(delivery)] = time.monotonic()
            self._missed.add(delivery.key)

    def is_left(self, key: K, pid: int | None) -> bool:
        """Tell whether a process that holds a run in the store never began it: the lock was applied too late."""
        with self._lock:
            may_run = any(delivery.pid == pid and not delivery.idle for delivery in self._deliveries.get(key, ()))
            return (key, pid) in self._left and not may_run

    def missed(self) -> list[K]:
        """Return the runs whose message was dropped here, each once."""
        with self._lock:
            missed, self._missed = self._missed, set()
        return sorted(missed)

    def stopped(self, key: K) -> None:
        """Note that the worker has stopped the run: all its deliveries are over."""
        with self._lock:
            for delivery in self._deliveries.get(key, ()):
                delivery.over_at = time.monotonic()

    def planned(self, key: K, plan: str) -> None:
        """Note that the worker is about to stop the run's process, and why: `ENDED` or `RELEASED`."""
        with self._lock:
            for delivery in self._deliveries.get(key, ()):
                delivery.plan = plan

    def plan_of(self, key: K) -> str | None:
        """Return why the worker stops the run's process; None if it does not, so that the death is a loss."""
        with self._lock:
            return next((delivery.plan for delivery in self._deliveries.get(key, ()) if delivery.plan), None)

    def busy(self) -> set[int]:
        """Return the processes that have a delivery which, as far as this worker knows, is not over."""
        with self._lock:
            return {delivery.pid for delivery in self._all() if delivery.pid and delivery.over_at is None}

    def of_process(self, pid: int) -> list[K]:
        """Return the runs of a process that has died, and forget their deliveries."""
        with self._lock:
            gone = [delivery for delivery in self._all() if delivery.pid == pid and delivery.over_at is None]
            self._forget(gone)
            for delivery in gone:
                self._left.pop(_run_in_process(delivery), None)
        return [delivery.key for delivery in gone]

    def running_in(self, pid: int) -> set[K]:
        """Return the runs that a process has begun and not ended, as far as this worker knows."""
        with self._lock:
            return {one.key for one in self._all() if one.pid == pid and one.over_at is None}

    def begun(self) -> set[K]:
        """Return the runs that a process has begun, as far as this worker knows; those that are over, for a while."""
        with self._lock:
            return {one.key for one in self._all() if one.pid is not None and not one.idle}

    def waiting(self, *, for_s: float, every_s: float) -> list[K]:
        """Return the runs whose delivery waits here for a process, and note that they are vouched for now.

        A run is returned if it has waited for `for_s` seconds and was not returned in the last `every_s`.
        """
        now = time.monotonic()
        with self._lock:
            found = [
                delivery
                for delivery in self._all()
                if delivery.pid is None
                and delivery.over_at is None
                and (delivery.request is None or delivery.request() is not None)
                and now - delivery.received_at >= for_s
                and (delivery.vouched_at is None or now - delivery.vouched_at >= every_s)
            ]
            for delivery in found:
                delivery.vouched_at = now
        return sorted({delivery.key for delivery in found})

    def disconnected(self, begins: Callable[[object], bool] = lambda _: False) -> list[Any]:
        """Forget waiting deliveries: the worker drops them with its connection, and the broker delivers them again.

        All but those whose request `begins` here all the same. Returns the holds of runs with no other delivery here.
        """
        with self._lock:
            waiting = [one for one in self._all() if one.pid is None and one.over_at is None]
            gone = [one for one in waiting if not begins(one.request and one.request())]
            self._forget(gone)
            return [_let_go(one) for one in gone if one.held is not None and one.key not in self._deliveries]

    def let_go(self, delivery: Delivery[K]) -> Any:
        """Return how the row of a delivery that will not begin is held; None if somebody else gives it back.

        The next hold of a job's row may have the same name: one of them must not be given back for the other.
        """
        with self._lock:
            return _let_go(delivery)

    def own_leases(self) -> dict[Any, float]:
        """Return the runs that renew their own lease, {job id: seconds}."""
        with self._lock:
            return {
                delivery.key[0]: delivery.lease_s
                for delivery in self._all()
                if delivery.lease_s is not None and delivery.pid is not None and delivery.over_at is None
            }

    def knows(self, key: K) -> bool:
        """Tell whether the run may still be in progress here, or has only just ended."""
        with self._lock:
            return any(
                delivery.over_at is None or time.monotonic() - delivery.over_at < GRACE_S
                for delivery in self._deliveries.get(key, ())
            )

    def is_over(self, key: K) -> bool:
        """Tell whether a run of this worker is over: it was stopped, or the worker has since been declared dead."""
        with self._lock:
            found = self._deliveries.get(key, ())
            return key in self._dropped or bool(found and all(delivery.over_at is not None for delivery in found))

    def sweep(self) -> None:
        """Forget deliveries that have been over for longer than `GRACE_S`."""
        now = time.monotonic()
        with self._lock:
            self._forget([old for old in self._all() if old.over_at is not None and now - old.over_at >= GRACE_S])
            self._left = {one: since for one, since in self._left.items() if now - since < LEFT_S}

    def clear(self) -> list[K]:
        """Forget everything and return the runs not over: this worker was declared dead, so its runs are refused."""
        with self._lock:
            left = [delivery.key for delivery in self._all() if delivery.over_at is None]
            self._dropped = frozenset(left)
            self._deliveries.clear()
            self._left.clear()
        return left

    def _all(self) -> list[Delivery[K]]:
        return [delivery for deliveries in self._deliveries.values() for delivery in deliveries]

    def _turn(self, deliveries: list[Delivery[K]], run: K) -> None:
        turned = [delivery for delivery in deliveries if delivery.key != run]
        self._forget(turned)
        for delivery in turned:
            delivery.key = run
            self._deliveries.setdefault(run, []).append(delivery)

    def _forget(self, gone: list[Delivery[K]]) -> None:
        for delivery in gone:
            of_run = self._deliveries[delivery.key]
            of_run.remove(delivery)
            if not of_run:
                del self._deliveries[delivery.key]


def _let_go(delivery: Delivery[Any]) -> Any:
    held, delivery.held = delivery.held, None
    return held


def _run_in_process(delivery: Delivery[K]) -> tuple[K, int]:
    """Return the run of a delivery and the process that had it."""
    return delivery.key, delivery.pid or 0
