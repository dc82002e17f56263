"""The processes of a trial: workers, a beat and clients, each in a place that is filled again when it is empty.

As a supervisor of services does it: who ends is followed by another, after a moment; nobody waits for it to be ready.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from proofs.trial.ground import Ground
from tests.tools.freezing import is_alive
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Process, Processes

SETTINGS = {
    "SIDEJOB_LEASE": "6",
    "SIDEJOB_HEARTBEAT_INTERVAL": "1",
    "SIDEJOB_LOST_AFTER": "10",
    "SIDEJOB_MAX_LOSSES": "100",
    "SIDEJOB_POLL_INTERVAL": "10",
}
"""Shorter times than the defaults, so that more happens; and no giving up, where so much dies."""
LEASE_S = float(SETTINGS["SIDEJOB_LEASE"])
PAUSE_S = 1.0
"""Before a place is filled again."""
STOP_S = 60.0
"""How long a worker may take for its warm stop; Celery's own takes half a minute now and then."""


@dataclass
class Place:
    """One of the processes there are to be; `process` is the present one."""

    name: str
    kind: str
    start: Callable[[], Process]
    spared: bool = False
    """Not to be killed, so that it grows old: for the figures of memory."""
    process: Process | None = None
    since: float = 0.0
    empty_since: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether somebody is there, frozen or not."""
        return self.process is not None and self.process.alive


@dataclass
class Fleet:
    """All places, and who is on the way out."""

    ground: Ground
    processes: Processes
    record: Record
    """What clients note."""
    notes: Record
    """What bodies note."""
    seed: int
    rate: float
    pools: list[str]
    clients: int
    retention_s: float
    say: Callable[[str], None]
    app: str
    """The module of workers and beat."""
    client: str
    """The module that is run with a number, the seed and the rate."""
    places: list[Place] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    """Processes that ended, by kind and how."""
    hung: list[str] = field(default_factory=list)
    """Warm stops that were not over within `STOP_S`: the ends of their logs."""
    stops_s: list[float] = field(default_factory=list)
    """How long the warm stops took that came to their end."""

    def __post_init__(self) -> None:
        self._leaving: list[tuple[Process, float]] = []
        self._swept_at = 0.0
        self._numbers = itertools.count(1)
        self._expected: set[int] = set()
        names: Counter[str] = Counter()
        for pool in self.pools:
            names[pool] += 1
            name = f"{pool}{names[pool]}"
            self.places.append(Place(name, "worker", lambda pool=pool, name=name: self._start_worker(pool, name)))
        self.places[-1].spared = True
        self.places.append(Place("beat", "beat", self._start_beat))
        for number in range(self.clients):
            self.places.append(Place(f"client{number + 1}", "client", self._start_client))

    def of(self, *kinds: str) -> list[Place]:
        """The places of these kinds where somebody is."""
        return [place for place in self.places if place.kind in kinds and place.alive]

    def tend(self, *, without: str = "") -> None:
        """Fill places that have been empty for a moment, but those of one kind, and see off who has left."""
        now = time.monotonic()
        for place in self.places:
            if place.kind == without:
                continue
            if place.process is not None and not place.process.alive:
                self._note_end(place)
                self._leaving.append((place.process, now + PAUSE_S))
                place.process, place.empty_since = None, now
            elif place.process is None and now - place.empty_since > PAUSE_S:
                place.process, place.since = place.start(), now
        if now - self._swept_at > 1.0:
            self._swept_at = now
            self._see_off(now)

    def expect_end(self, process: Process) -> None:
        """A fault ends this process: its end tells nothing."""
        self._expected.add(process.pid)

    def follow(self, place: Place) -> None:
        """Ask the process to stop, and have another take its place at once: a rolling deployment."""
        assert place.process is not None
        self.expect_end(place.process)
        place.process.terminate()
        self._leaving.append((place.process, time.monotonic() + STOP_S))
        place.process, place.since = place.start(), time.monotonic()

    def dismiss(self, *kinds: str) -> None:
        """Ask all of these kinds to stop, for good, and wait for it."""
        going = [place for place in self.places if place.kind in kinds]
        self.places = [place for place in self.places if place not in going]
        begun = time.monotonic()
        for place in going:
            if place.process is not None:
                self.expect_end(place.process)
                place.process.terminate()
                self._leaving.append((place.process, begun + STOP_S))
        while self._leaving:
            self._see_off(time.monotonic())
            time.sleep(0.1)

    def wait_for_workers(self, timeout: float) -> None:
        """Fill all places but those of clients until every worker has said that it is ready."""

        def ready() -> bool:
            self.tend(without="client")
            return self._workers_are_ready

        wait_until(ready, timeout=timeout, interval=0.5, message="all workers to be ready")

    @property
    def _workers_are_ready(self) -> bool:
        workers = [place for place in self.places if place.kind == "worker"]
        return all(place.process is not None and place.alive and " ready." in place.process.log() for place in workers)

    def _see_off(self, now: float) -> None:
        for process, deadline in list(self._leaving):
            gone = not process.alive and not any(is_alive(pid) for pid in process.group())
            if not gone and now < deadline:
                continue
            if not gone and process.alive:
                self.hung.append(f"{process!r}\n{process.log_tail(15)}")
            elif gone and process.pid in self._expected:
                self.stops_s.append(now - (deadline - STOP_S))
            self._leaving.remove((process, deadline))
            self._expected.discard(process.pid)
            self.processes.end(process)

    def _note_end(self, place: Place) -> None:
        assert place.process is not None
        code = place.process.wait(0.1)
        if place.process.pid in self._expected:
            self._expected.discard(place.process.pid)
        else:
            last = [line for line in place.process.log_tail(3).splitlines() if line.strip()]
            self.say(f"{place.name} ended by itself with {code}; its log ends with:\n{place.process.log_tail(12)}")
            self.ended[f"{place.kind} ended by itself with {code}: {last[-1][:100] if last else ''}"] += 1

    # -- starting --------------------------------------------------------------------------------------------------

    @property
    def _env(self) -> dict[str, str]:
        return {**self.ground.env, **SETTINGS, "SIDEJOB_RETENTION": str(self.retention_s), **self.notes.env}

    def _start_worker(self, pool: str, name: str) -> Process:
        return self.processes.start_worker(
            self.app, env=self._env, pool=pool, concurrency=1 if pool == "solo" else 2,
            name=f"{name}-{next(self._numbers)}", ready_timeout=None,
        )  # fmt: skip

    def _start_beat(self) -> Process:
        return self.processes.start_beat(
            self.app, env=self._env, name=f"beat-{next(self._numbers)}", ready_timeout=None
        )

    def _start_client(self) -> Process:
        number = next(self._numbers)
        argv = [sys.executable, "-m", self.client, str(number), str(self.seed), str(self.rate)]
        return self.processes.start(argv, env={**self._env, **self.record.env}, name=f"client-{number}")
