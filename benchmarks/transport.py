"""The Redis transport `sidejob://` against kombu's `redis://`, in turns: publishing, running and waiting.

    python -m benchmarks transport [--rounds 30] [--tasks 600] [--only publish,solo] [--sides stock,sidejob]

Plain Celery on `redis://`, in clients and workers that import nothing of this package; plain Celery on `sidejob://`;
and durable tasks on `sidejob://`, as they come and with `locks_late`. Both of these publish alike; of drains, the bound
is for those that lock late, and the others are shown. All have the same redis-py, with hiredis if it is installed, and
a database each of the same server; Redis writes nothing to disk, and Postgres is durable.

Each figure is the median over rounds, with the interval in which it lies with 95 % certainty; a ratio is that inside a
round, and a bound is met if the interval's better end reaches it. A drain begins with a worker's first look and
ends with the last body; each must have run exactly once, and then nothing may be left.
"""

from __future__ import annotations

import argparse
import enum
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import psycopg

from benchmarks.durable import Bound, Side, print_machine
from benchmarks.idle import scalar
from benchmarks.stamps import LATE_SCHEMA
from benchmarks.throughput import POOLS, servers
from benchmarks.turns import Median, take_turns
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, environment

PUBLISHED = 1000
OF_THREADS = 1000
TOGETHER = 1000
WAITED_FOR = 20


class Tasks(enum.Enum):
    """Of which kind a side's task is."""

    PLAIN = enum.auto()
    DURABLE = enum.auto()
    LATE = enum.auto()
    """Durable, and locks late."""


SIDES = {
    "stock": ("plain on redis://", "redis", Tasks.PLAIN),
    "sidejob": ("plain on sidejob://", "sidejob", Tasks.PLAIN),
    "durable": ("durable on sidejob://", "sidejob", Tasks.DURABLE),
    "late": ("the same, locks_late", "sidejob", Tasks.LATE),
}
"""What each is called, by which transport, and its tasks; all are compared with the first."""
BOUNDS = {
    ("sidejob", "publish"): Bound(1.25),
    ("sidejob", "drain, prefork -c 2"): Bound(1.3),
    ("sidejob", "drain, solo"): Bound(1.3),
    ("sidejob", "idle latency"): Bound(1.1, most=True),
    ("durable", "publish"): Bound(1.0),
    ("durable", "publish, threads"): Bound(1.0),
    ("durable", "publish together"): Bound(1.0),
    ("late", "drain, prefork -c 2"): Bound(1.0),
    ("late", "drain, solo"): Bound(1.0),
}
SECTIONS = ("publish", "threads", "together", "prefork", "solo", "latency")


def main(arguments: list[str]) -> int:
    """Measure, print, and return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks transport", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tasks", type=int, default=600, help="how many a drain has")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"of {', '.join(SIDES)}")
    given = parser.parse_args(arguments)
    wanted, sides = given.only.split(","), given.sides.split(",")
    if unknown := (set(wanted) - set(SECTIONS)) | (set(sides) - set(SIDES)):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    with Bench.opened(["stock", *(side for side in SIDES if side in sides and side != "stock")]) as bench:
        if "publish" in wanted:
            bench.publish(given.rounds)
        if "threads" in wanted:
            bench.threads(given.rounds)
        if "together" in wanted:
            bench.together(given.rounds)
        for name, (pool, concurrency) in POOLS.items():
            if pool in wanted:
                with bench.workers(pool, concurrency):
                    bench.drain(name, given.rounds, given.tasks)
        if "latency" in wanted:
            with bench.workers(*POOLS["prefork -c 2"]):
                bench.latency(given.rounds)
    return 0 if bench.met else 1


class Client:
    """A process that publishes for one side (`client.py`)."""

    def __init__(self, side: Side, guard: Guard, *, plain: bool) -> None:
        env = {"BROKER_URL": side.broker_url, "STAMPS": str(side.stamps)}
        if side.database_url is not None:
            env["DATABASE_URL"] = side.database_url
        if side.schema == LATE_SCHEMA:
            env["LOCKS_LATE"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.client"], env=environment(env), text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self._process.pid
        guard.watch(self.pid)
        self._guard = guard
        assert self._answer() == ("plain" if plain else "ours")

    def ask(self, verb: str, count: int) -> float:
        """Have it do something, and return the figure that it gives."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb} {count}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=30)
        self._guard.forget(self.pid)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Bench:
    """The servers, the sides with a client each, and what was found."""

    def __init__(self, sides: dict[str, Side], clients: dict[str, Client], processes: Processes, database: str) -> None:
        self._sides = sides
        self._clients = clients
        self._processes = processes
        self._looking = psycopg.connect(database, autocommit=True)
        self.met = True

    @classmethod
    @contextmanager
    def opened(cls, names: list[str]) -> Iterator[Bench]:
        """Start servers and clients; everything ends with the block."""
        with ExitStack() as stack:
            postgres, broker_url = stack.enter_context(servers(appendonly=False))
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            guard = stack.enter_context(Guard())
            processes = Processes(directory / "processes", guard)
            stack.callback(processes.kill_all)
            upgrade(postgres.url, LATE_SCHEMA)
            sides, clients = {}, {}
            for number, name in enumerate(names):
                _, scheme, tasks = SIDES[name]
                url = f"{scheme}:{broker_url.partition(':')[2]}"
                store = None if tasks is Tasks.PLAIN else postgres.url
                sides[name] = Side(url, number, store, directory, locks_late=tasks is Tasks.LATE)
                stack.callback(sides[name].close)
                clients[name] = Client(sides[name], guard, plain=name == "stock")
                stack.callback(clients[name].close)
            bench = cls(sides, clients, processes, postgres.url)
            stack.callback(bench._looking.close)
            print_machine(bench._looking, sides["stock"].redis, _parser())
            yield bench

    @contextmanager
    def workers(self, pool: str, concurrency: int) -> Iterator[None]:
        """A worker for each side, of its own app."""
        for side in self._sides.values():
            side.start_worker(self._processes, pool, concurrency)
        yield
        for side in self._sides.values():
            assert side.worker is not None
            assert side.worker.alive
            self._processes.end(side.worker)

    def publish(self, rounds: int) -> None:
        """One call after the other, with nobody who listens."""
        self._measure("publish", "per second, delay()", partial(self._publish, "publish", PUBLISHED), rounds)

    def threads(self, rounds: int) -> None:
        """The same from four threads of one process."""
        one = partial(self._publish, "threads", OF_THREADS)
        self._measure("publish, threads", "per second, delay() from four threads", one, rounds)

    def together(self, rounds: int) -> None:
        """A thousand in one go: by kombu's batch, or by `send_many`."""
        one = partial(self._publish, "together", TOGETHER)
        self._measure("publish together", "per second, Producer.batch or send_many", one, rounds)

    def drain(self, pool: str, rounds: int, tasks: int) -> None:
        """Tasks that were published while the worker stood still."""
        self._measure(f"drain, {pool}", f"per second, {pool}", partial(self._drain, tasks=tasks), rounds)

    def latency(self, rounds: int) -> None:
        """From the call to the body's first line, one task every 20 ms."""
        self._measure("idle latency", "us, p50 of an idle worker", self._wait, rounds)

    def _measure(self, name: str, unit: str, one: Callable[[str], float], rounds: int) -> None:
        found = take_turns({side: partial(one, side) for side in self._sides}, rounds)
        print(f"\n{unit}")
        for side, figures in found.items():
            print(f"  {SIDES[side][0]:24}{median(figures):8.0f}")
        for side in list(found)[1:]:
            ratio = Median.of_ratios(found[side], found["stock"])
            text = f"{SIDES[side][0]}, of {SIDES['stock'][0]}: {ratio}"
            bound = BOUNDS.get((side, name))
            if bound is not None:
                met = bound.met_by(ratio)
                self.met &= met
                most = "at most" if bound.most else "at least"
                text += f"   bound {most} {bound.limit:g}: {'met' if met else 'MISSED'}"
            print(f"  {text}", flush=True)

    def _publish(self, verb: str, count: int, name: str) -> float:
        side = self._sides[name]
        rate = self._clients[name].ask(verb, count)
        wait_until(lambda: side.redis.llen("celery") >= count, message="Redis to have all")
        assert side.redis.llen("celery") == count
        side.forget_messages()
        if side.schema is not None:
            assert self._rows(side) == count
            self._looking.execute(f"DELETE FROM {side.schema}.messages")
        return rate

    def _drain(self, name: str, *, tasks: int) -> float:
        side = self._sides[name]
        assert side.worker is not None
        side.worker.stop_signal()
        side.forget_stamps()
        self._clients[name].ask("publish", tasks)
        wait_until(lambda: side.redis.llen("celery") >= tasks - 1, message="Redis to have all")  # one may be on its way
        rate = side.drained(tasks)
        self._wait_quiet(side, tasks)
        return rate

    def _wait(self, name: str) -> float:
        side = self._sides[name]
        side.forget_stamps()
        took_us = self._clients[name].ask("wait", WAITED_FOR)
        self._wait_quiet(side, WAITED_FOR)
        return took_us

    def _wait_quiet(self, side: Side, count: int) -> None:
        if side.schema is not None:
            wait_until(lambda: not self._rows(side), timeout=30, interval=0.01, message="all rows to be gone")
        held = ("celery", "unacked", *side.redis.keys("_sidejob.held.*"))
        wait_until(lambda: not side.redis.exists(*held), timeout=30, message="all to be acknowledged")
        assert side.count() == count or (side.schema == LATE_SCHEMA and side.count() > count), "each body runs once"

    def _rows(self, side: Side) -> int:
        return scalar(self._looking, f"SELECT count(*) FROM {side.schema}.messages")


def _parser() -> str:
    try:
        return f"hiredis {version('hiredis')}"
    except PackageNotFoundError:
        return "no hiredis"
