"""What befalls a trial: each kind of fault, what it takes for itself, and how it is healed. The clock is left alone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field

import psycopg

from proofs.trial.fleet import LEASE_S, Fleet, Place
from proofs.trial.ground import Ground
from tests.tools.freezing import frozen
from tests.tools.workers import WorkerProcess


@dataclass
class Happening:
    """One fault that happened, in seconds since 1970."""

    name: str
    begun_at: float
    ended_at: float = float("inf")

    def overlaps(self, begun_at: float, ended_at: float) -> bool:
        """Whether it was there at any time between."""
        return self.begun_at <= ended_at and begun_at <= self.ended_at


@dataclass
class Loss:
    """Processes lost what they ran, by our doing."""

    at: float
    pids: frozenset[int]
    """Those that ran jobs: a worker's pool, or the worker itself."""
    during: Happening
    until: float = float("inf")
    """When they went on, as processes that were only stopped do."""


@dataclass
class Scenery:
    """What faults act on."""

    ground: Ground
    fleet: Fleet
    dice: random.Random
    losses: list[Loss] = field(default_factory=list)
    now: Happening = field(default_factory=lambda: Happening("", 0.0))
    """The fault that begins just now."""

    def worker(self, *, with_pool: bool = False) -> Place | None:
        """Any worker that may be killed, None if there is none just now."""
        found = [
            place
            for place in self.fleet.of("worker")
            if not place.spared and (not with_pool or (place.process is not None and _pool_of(place)))
        ]
        return self.dice.choice(found) if found else None

    def lose(self, pids: Iterable[int]) -> Loss:
        """Note that processes lose what they run, now."""
        loss = Loss(time.time(), frozenset(pids), self.now)
        self.losses.append(loss)
        return loss


Act = Callable[[Scenery], AbstractContextManager[str]]


@dataclass(frozen=True)
class Fault:
    """One kind of fault: its act begins with the block and is healed at its end."""

    act: Act
    on: str
    """What it takes for itself: two faults on the same are not there at once."""
    lasts_s: tuple[float, float] = (0.0, 0.0)
    cards: int = 1
    needs: str = ""
    """What must be as it should for this to begin."""


# -- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def kill_worker(scenery: Scenery) -> Iterator[str]:
    """SIGKILL the worker's main process; its pool follows by itself."""
    place = scenery.worker()
    if place is not None and place.process is not None:
        scenery.lose(_runners(place))
        scenery.fleet.expect_end(place.process)
        place.process.kill()
    yield place.name if place else "nobody"


@contextmanager
def kill_pool_process(scenery: Scenery) -> Iterator[str]:
    place = scenery.worker(with_pool=True)
    if place is not None:
        pid = scenery.dice.choice(_pool_of(place))
        scenery.lose([pid])
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    yield place.name if place else "nobody"


@contextmanager
def kill_client(scenery: Scenery) -> Iterator[str]:
    yield _kill(scenery, "client")


@contextmanager
def kill_beat(scenery: Scenery) -> Iterator[str]:
    yield _kill(scenery, "beat")


@contextmanager
def kill_all_workers(scenery: Scenery) -> Iterator[str]:
    """Kill all but the spared one, which stands still meanwhile: nobody works."""
    spared = [place for place in scenery.fleet.of("worker") if place.spared]
    stopped = [place.process for place in spared if place.process is not None]
    losses = [scenery.lose(_runners(place)) for place in spared]
    for process in stopped:
        process.stop_signal()
    for place in scenery.fleet.of("worker"):
        if not place.spared and place.process is not None:
            scenery.lose(_runners(place))
            scenery.fleet.expect_end(place.process)
            place.process.kill_group()
    yield "all"
    for process in stopped:
        process.cont()
    for loss in losses:
        loss.until = time.time()


@contextmanager
def freeze_worker(scenery: Scenery) -> Iterator[str]:
    """SIGSTOP a worker with its pool."""
    workers = scenery.fleet.of("worker")
    place = scenery.dice.choice(workers) if workers else None
    if place is None or place.process is None:
        yield "nobody"
        return
    process, loss = place.process, scenery.lose(_runners(place))
    process.stop_signal()
    yield place.name
    process.cont()
    loss.until = time.time()


@contextmanager
def deploy(scenery: Scenery) -> Iterator[str]:
    """SIGTERM, and a new worker in its place at once."""
    workers = scenery.fleet.of("worker")
    going = workers if scenery.dice.random() < 0.3 else [scenery.dice.choice(workers)] if workers else []
    going = [place for place in going if not place.spared]
    for place in going:
        scenery.fleet.follow(place)
    yield ", ".join(place.name for place in going)


@contextmanager
def stop_cold(scenery: Scenery) -> Iterator[str]:
    """SIGQUIT: the worker gives back what it runs."""
    place = scenery.worker()
    if place is not None and place.process is not None:
        scenery.fleet.expect_end(place.process)
        place.process.send_signal(signal.SIGQUIT)
    yield place.name if place else "nobody"


# -- the broker -------------------------------------------------------------------------------------------------------


@contextmanager
def empty_broker(scenery: Scenery) -> Iterator[str]:
    scenery.ground.broker.empty()
    yield ""


@contextmanager
def kill_broker(scenery: Scenery) -> Iterator[str]:
    """Kill it; it comes back with what it had, or empty."""
    server, comes_back_empty = scenery.ground.broker.server, scenery.dice.random() < 0.5
    assert server is not None
    server.kill()
    yield "comes back empty" if comes_back_empty else "comes back with what it had"
    server.start()
    if comes_back_empty:
        scenery.ground.broker.empty()


@contextmanager
def freeze_broker(scenery: Scenery) -> Iterator[str]:
    server = scenery.ground.broker.server
    assert server is not None
    with frozen(server.pid):
        yield ""


# -- the store --------------------------------------------------------------------------------------------------------


@contextmanager
def kill_store(scenery: Scenery) -> Iterator[str]:
    """All of Postgres' processes at once."""
    scenery.ground.postgres.kill()
    yield ""
    scenery.ground.postgres.start()


@contextmanager
def restart_store(scenery: Scenery) -> Iterator[str]:
    """In good order, as for an update."""
    scenery.ground.postgres.restart()
    yield ""


@contextmanager
def freeze_store(scenery: Scenery) -> Iterator[str]:
    with frozen(scenery.ground.postgres.pid):
        yield ""


@contextmanager
def terminate_backends(scenery: Scenery) -> Iterator[str]:
    with psycopg.connect(scenery.ground.aside_url, autocommit=True) as connection:
        cursor = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'sidejob'"  # we are not in that one
        )
        yield f"{cursor.rowcount} connections"


@contextmanager
def pin_xmin(scenery: Scenery) -> Iterator[str]:
    """A transaction that somebody left open: nothing that is deleted meanwhile can be cleaned away."""
    connection = psycopg.connect(scenery.ground.database_url)
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute("SELECT count(*) FROM sidejob.workers")
    yield ""
    with suppress(psycopg.Error):  # Postgres may have been restarted under it
        connection.close()


# -- networks ---------------------------------------------------------------------------------------------------------


def net(side: str, how: str) -> Act:
    """A network that refuses, is silent, or is cut for an instant."""

    @contextmanager
    def act(scenery: Scenery) -> Iterator[str]:
        proxy = getattr(scenery.ground, f"{side}_net")
        getattr(proxy, how)()
        yield ""
        proxy.pass_through()

    return act


def slow(side: str, least_s: float, most_s: float) -> Act:
    """A network that takes its time."""

    @contextmanager
    def act(scenery: Scenery) -> Iterator[str]:
        proxy = getattr(scenery.ground, f"{side}_net")
        delay_s = scenery.dice.uniform(least_s, most_s)
        proxy.delay(delay_s)
        yield f"{delay_s:.2f} s"
        proxy.pass_through()

    return act


@contextmanager
def lose_answer(scenery: Scenery) -> Iterator[str]:
    """Postgres has committed, and whoever asked is not told."""
    scenery.ground.store_net.cut_after(b"COMMIT")
    yield ""


SHORT, LONG = (1.0, 4.0), (2.0, 9.0)
PAST_LEASE = (LEASE_S + 2, LEASE_S + 6)
FAULTS: dict[str, Fault] = {
    "worker killed": Fault(kill_worker, "workers", cards=3),
    "pool process killed": Fault(kill_pool_process, "workers", cards=3),
    "client killed": Fault(kill_client, "clients", cards=2),
    "beat killed": Fault(kill_beat, "beat"),
    "all workers killed": Fault(kill_all_workers, "workers", SHORT),
    "worker stopped past its lease": Fault(freeze_worker, "workers", PAST_LEASE, cards=2),
    "worker stopped for a moment": Fault(freeze_worker, "workers", (0.5, 2.0)),
    "rolling deployment": Fault(deploy, "workers", cards=2),
    "cold stop": Fault(stop_cold, "workers"),
    "broker emptied": Fault(empty_broker, "broker", cards=2),
    "broker killed": Fault(kill_broker, "broker", LONG),
    "broker stopped": Fault(freeze_broker, "broker", LONG),
    "broker refuses": Fault(net("broker", "refuse"), "broker network", LONG),
    "broker silent": Fault(net("broker", "black_hole"), "broker network", LONG),
    "broker slow": Fault(slow("broker", 0.05, 0.7), "broker network", LONG),
    "broker connections cut": Fault(net("broker", "cut"), "broker network"),
    "store killed": Fault(kill_store, "store", (0.0, 6.0)),
    "store killed past the lease": Fault(kill_store, "store", PAST_LEASE),
    "store restarted": Fault(restart_store, "store"),
    "store stopped": Fault(freeze_store, "store", LONG),
    "store connections terminated": Fault(terminate_backends, "store"),
    "store refuses": Fault(net("store", "refuse"), "store network", LONG),
    "store silent": Fault(net("store", "black_hole"), "store network", (2.0, 12.0)),
    "store slow": Fault(slow("store", 0.02, 0.15), "store network", LONG),
    "store connections cut": Fault(net("store", "cut"), "store network"),
    "answer of a commit lost": Fault(lose_answer, "store network", cards=2),
    "transaction left open": Fault(pin_xmin, "vacuum", (20.0, 60.0), needs="store"),
}
"""By name."""


def _kill(scenery: Scenery, kind: str) -> str:
    places = scenery.fleet.of(kind)
    if not places:
        return "nobody"
    place = scenery.dice.choice(places)
    assert place.process is not None
    scenery.fleet.expect_end(place.process)
    place.process.kill()
    return place.name


def _runners(place: Place) -> list[int]:
    """The processes of a worker that run jobs."""
    assert place.process is not None
    return _pool_of(place) or [place.process.pid]


def _pool_of(place: Place) -> list[int]:
    assert place.process is not None
    if not isinstance(place.process, WorkerProcess) or not place.name.startswith("prefork"):
        return []
    return place.process.children()
