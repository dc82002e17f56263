"""The transports `sidejob://` and `sidejobpg://` against kombu's `redis://`, in turns: publishing, running and waiting.

    python -m benchmarks transport [--rounds 30] [--tasks 600] [--only publish,solo] [--sides stock,sidejob]
        [--prefetch 16]

Plain Celery on `redis://`, in clients and workers that import nothing of this package; plain Celery on `sidejob://`;
durable tasks on `sidejob://`, as they come and with `on_lost="requeue"`; jobs there; and, if they are named in
`--sides`, plain Celery on `sidejobpg://` (`postgres`), and with `synchronous_commit` off (`late_commit`); and durable
tasks and jobs where that broker is their store (`pg_durable`, `pg_requeue`, `pg_jobs`). Both kinds of durable tasks
publish alike; of drains, the bound is for those that may be repeated, and the others are shown. All have the same
redis-py, with hiredis if it is installed, and a database each of the same server; Redis writes nothing to disk, and
Postgres is durable.

Each figure is the median over rounds, with the interval in which it lies with 95 % certainty; a ratio is that inside a
round, and a bound is met if the interval's better end reaches it. A drain begins with a worker's first look and
ends with the last body; each must have run exactly once, and then nothing may be left. `--prefetch` is the
`worker_prefetch_multiplier` of all sides but the first, plain Celery on `redis://`, which keeps Celery's default.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psycopg

from benchmarks.durable import Bound, Side, print_machine
from benchmarks.idle import cpu_of, scalar
from benchmarks.servers import POOLS, servers
from benchmarks.stamped import Stamped, Watched
from benchmarks.stamps import JOBS_SCHEMA, REQUEUE_SCHEMA, SCHEMA
from benchmarks.turns import Median, take_turns
from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, environment

PUBLISHED = 1000
OF_THREADS = 1000
TOGETHER = 1000
WAITED_FOR = 20


SIDES: dict[str, tuple[str, str, str | None]] = {
    "stock": ("plain on redis://", "redis", None),
    "sidejob": ("plain on sidejob://", "sidejob", None),
    "durable": ("durable on sidejob://", "sidejob", SCHEMA),
    "requeue": ("the same, requeue", "sidejob", REQUEUE_SCHEMA),
    "jobs": ("jobs on sidejob://", "sidejob", JOBS_SCHEMA),
    "postgres": ("plain on sidejobpg://", "sidejobpg", None),
    "late_commit": ("the same, commits late", "sidejobpg", None),
    "pg_durable": ("durable on sidejobpg://", "sidejobpg", SCHEMA),
    "pg_requeue": ("requeue on sidejobpg://", "sidejobpg", REQUEUE_SCHEMA),
    "pg_jobs": ("jobs on sidejobpg://", "sidejobpg", JOBS_SCHEMA),
}
"""What each is called, by which transport, and in which schema; all are compared with the first."""
IN_POSTGRES: dict[str, dict[str, str]] = {
    "postgres": {"schema": "plain"},
    "late_commit": {"schema": "late_commit", "synchronous_commit": "off"},
    "pg_durable": {"schema": SCHEMA},
    "pg_requeue": {"schema": REQUEUE_SCHEMA},
    "pg_jobs": {"schema": JOBS_SCHEMA},
}
"""The transport options of sides whose broker is a Postgres: each has a schema of its own, in a database of theirs."""
BOUNDS = {
    ("sidejob", "publish"): Bound(1.25),
    ("sidejob", "drain, prefork -c 2"): Bound(1.3),
    ("sidejob", "drain, solo"): Bound(1.3),
    ("sidejob", "idle latency"): Bound(1.1, most=True),
    ("durable", "publish"): Bound(1.0),
    ("durable", "publish, threads"): Bound(1.0),
    ("durable", "publish together"): Bound(1.0),
    ("requeue", "drain, prefork -c 2"): Bound(1.0),
    ("requeue", "drain, solo"): Bound(1.0),
    ("postgres", "publish"): Bound(0.6),
    ("postgres", "publish, threads"): Bound(0.9),
    ("postgres", "publish together"): Bound(1.0),
    ("postgres", "drain, prefork -c 2"): Bound(1.4),
    ("postgres", "idle latency"): Bound(1.5, most=True),
    ("late_commit", "publish"): Bound(1.0),
    ("pg_durable", "publish"): Bound(0.6),
    ("pg_durable", "publish, threads"): Bound(0.9),
    ("pg_durable", "publish together"): Bound(1.0),
    ("pg_durable", "drain, prefork -c 2"): Bound(0.85),
    ("pg_durable", "idle latency"): Bound(1.5, most=True),
    ("pg_requeue", "drain, prefork -c 2"): Bound(1.4),
    ("pg_jobs", "drain, prefork -c 2"): Bound(0.9),
}
WIDE = 16
"""The `worker_prefetch_multiplier` at which `WIDE_BOUNDS` hold."""
WIDE_BOUNDS = {
    ("postgres", "drain, prefork -c 2"): Bound(2.5),
    ("pg_requeue", "drain, prefork -c 2"): Bound(2.5),
}
SECTIONS = ("publish", "threads", "together", "prefork", "solo", "latency")


def main(arguments: list[str]) -> int:
    """Measure, print, and return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks transport", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tasks", type=int, default=600, help="how many a drain has")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument(
        "--sides", default=",".join(side for side in SIDES if side not in IN_POSTGRES), help=f"of {', '.join(SIDES)}"
    )
    parser.add_argument("--prefetch", type=int, help="worker_prefetch_multiplier of all sides but the first")
    given = parser.parse_args(arguments)
    wanted, sides = given.only.split(","), given.sides.split(",")
    if unknown := (set(wanted) - set(SECTIONS)) | (set(sides) - set(SIDES)):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    names = ["stock", *(side for side in SIDES if side in sides and side != "stock")]
    bounds = BOUNDS | (WIDE_BOUNDS if given.prefetch == WIDE else {})
    with Bench.opened(names, bounds=bounds, prefetch=given.prefetch) as bench:
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


class InPostgres(Side):
    """A side whose broker is a Postgres."""

    def __init__(
        self, broker_url: str, number: int, store: str | None, directory: Path, options: dict[str, str],
        prefetch: int | None,
    ) -> None:  # fmt: skip
        super().__init__(
            broker_url, number, store, directory, schema=options["schema"], transport_options=options,
            prefetch=prefetch,
        )  # fmt: skip
        self._messages = f"{options['schema']}.broker_messages"
        self.looking = psycopg.connect(broker_url.replace("sidejobpg:", "postgresql:", 1), autocommit=True)

    def waiting(self) -> int:
        """How many messages wait in the broker."""
        return scalar(self.looking, f"SELECT count(*) FROM {self._messages} WHERE holder IS NULL")

    def is_quiet(self) -> bool:
        """Whether the broker has no message, waiting or held."""
        return not scalar(self.looking, f"SELECT count(*) FROM {self._messages}")

    def forget_messages(self) -> None:
        """Empty the broker."""
        self.looking.execute(f"DELETE FROM {self._messages}")

    def close(self) -> None:
        """Adds to that of others: looks no more."""
        self.looking.close()
        super().close()

    def _url_of(self, broker_url: str, number: int) -> str:
        return broker_url


class Client:
    """A process that publishes for one side (`client.py`)."""

    def __init__(self, side: Stamped, guard: Guard, *, plain: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *side.client], env=environment(side.env), text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self._process.pid
        guard.watch(self.pid)
        self._guard = guard
        assert self._answer() == ("plain" if plain else "ours")

    def ask(self, *words: object) -> float:
        """Have it do something, and return the figure that it gives."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin)
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

    def __init__(
        self, sides: dict[str, Watched], clients: dict[str, Client], processes: Processes,
        postgres: embedded.Postgres, bounds: Mapping[tuple[str, str], Bound],
    ) -> None:  # fmt: skip
        self._sides = sides
        self._clients = clients
        self._bounds = bounds
        self._titles = {name: SIDES[name][0] if name in SIDES else name for name in sides}
        self._processes = processes
        self._looking = psycopg.connect(postgres.url, autocommit=True)
        self._postmaster = postgres.pid
        self._took_us: dict[str, list[tuple[float, float]]] = {}
        self.met = True

    @classmethod
    @contextmanager
    def opened(
        cls, names: list[str], *, peers: Mapping[str, Callable[[str, Path], Watched]] = {},
        bounds: Mapping[tuple[str, str], Bound] = BOUNDS, prefetch: int | None = None,
    ) -> Iterator[Bench]:  # fmt: skip
        """Start servers and clients; everything ends with the block. Peers are made from the Postgres' URL.

        `prefetch` holds for the workers of all sides but the stock one.
        """
        with ExitStack() as stack:
            postgres, broker_url = stack.enter_context(servers(appendonly=False))
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            guard = stack.enter_context(Guard())
            processes = Processes(directory / "processes", guard)
            stack.callback(processes.kill_all)
            for schema in (REQUEUE_SCHEMA, JOBS_SCHEMA):
                upgrade(postgres.url, schema)
            with psycopg.connect(postgres.url, autocommit=True) as connection:
                connection.execute("CREATE DATABASE broker")
            in_broker = urlsplit(postgres.url)._replace(path="/broker").geturl()
            for options in IN_POSTGRES.values():
                upgrade(in_broker, options["schema"])
            sides: dict[str, Watched] = {}
            clients = {}
            for number, name in enumerate(names):
                _, scheme, schema = SIDES[name]
                wanted = None if name == "stock" else prefetch
                if scheme == "sidejobpg":
                    url = f"{scheme}:{in_broker.partition(':')[2]}"
                    store = None if schema is None else in_broker
                    sides[name] = InPostgres(url, number, store, directory, IN_POSTGRES[name], wanted)
                else:
                    url = f"{scheme}:{broker_url.partition(':')[2]}"
                    store = None if schema is None else postgres.url
                    sides[name] = Side(url, number, store, directory, schema=schema or SCHEMA, prefetch=wanted)
                stack.callback(sides[name].close)
                clients[name] = Client(sides[name], guard, plain=name == "stock")
                stack.callback(clients[name].close)
            for name, make in peers.items():
                sides[name] = make(postgres.url, directory)
                stack.callback(sides[name].close)
                clients[name] = Client(sides[name], guard, plain=True)
                stack.callback(clients[name].close)
            bench = cls(sides, clients, processes, postgres, bounds)
            stack.callback(bench._looking.close)
            stock = sides["stock"]
            assert isinstance(stock, Side)
            print_machine(bench._looking, stock.redis, _parser())
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
        self._took_us.clear()
        self._measure(f"drain, {pool}", f"per second, {pool}", partial(self._drain, tasks=tasks), rounds)
        for name, took in self._took_us.items():
            worker, store = (median(part) for part in zip(*took, strict=True))
            print(f"  {self._titles[name]:24}worker {worker:5.0f} us, Postgres {store:5.0f} us of a processor for each")

    def latency(self, rounds: int) -> None:
        """From the call to the body's first line, one task every 20 ms."""
        self._measure("idle latency", "us, p50 of an idle worker", self._wait, rounds)

    def _measure(self, name: str, unit: str, one: Callable[[str], float], rounds: int) -> None:
        found = take_turns({side: partial(one, side) for side in self._sides}, rounds)
        print(f"\n{unit}")
        for side, figures in found.items():
            print(f"  {self._titles[side]:24}{median(figures):8.0f}")
        for side in list(found)[1:]:
            ratio = Median.of_ratios(found[side], found["stock"])
            text = f"{self._titles[side]}, of {self._titles['stock']}: {ratio}"
            bound = self._bounds.get((side, name))
            if bound is not None:
                met = bound.met_by(ratio)
                self.met &= met
                most = "at most" if bound.most else "at least"
                text += f"   bound {most} {bound.limit:g}: {'met' if met else 'MISSED'}"
            print(f"  {text}", flush=True)

    def _publish(self, verb: str, count: int, name: str) -> float:
        side = self._sides[name]
        rate = self._clients[name].ask(verb, count)
        wait_until(lambda: side.waiting() >= count, message="the broker to have all")
        assert side.waiting() == count
        side.forget_messages()
        if side.schema is not None:
            assert self._rows(side) == count
            looking = self._looking_of(side)
            looking.execute(f"DELETE FROM {side.schema}.messages")
            looking.execute(f"DELETE FROM {side.schema}.jobs")
        return rate

    def _drain(self, name: str, *, tasks: int) -> float:
        side = self._sides[name]
        assert side.worker is not None
        side.worker.stop_signal()
        side.forget_stamps()
        self._clients[name].ask("publish", tasks)
        wait_until(lambda: side.waiting() >= tasks - 1, message="the broker to have all")  # one may be on its way
        pids = side.worker.pid, self._postmaster
        before = [cpu_of(pid) for pid in pids]
        rate = side.drained(tasks)
        self._wait_quiet(side, tasks)
        worker, store = ((cpu_of(pid) - then) / tasks * 1e6 for pid, then in zip(pids, before, strict=True))
        self._took_us.setdefault(name, []).append((worker, store))
        return rate

    def _wait(self, name: str) -> float:
        side = self._sides[name]
        side.forget_stamps()
        took_us = self._clients[name].ask("wait", WAITED_FOR)
        self._wait_quiet(side, WAITED_FOR)
        return took_us

    def _wait_quiet(self, side: Stamped, count: int) -> None:
        if side.schema is not None:
            wait_until(lambda: not self._rows(side), timeout=30, interval=0.01, message="all rows to be gone")
        wait_until(side.is_quiet, timeout=30, message="all to be acknowledged")
        assert side.count() == count, "each body runs once"

    def _rows(self, side: Watched) -> int:
        return scalar(self._looking_of(side), f"SELECT count(*) FROM {side.schema}.messages")

    def _looking_of(self, side: Watched) -> psycopg.Connection[Any]:
        return side.looking if isinstance(side, InPostgres) else self._looking


def _parser() -> str:
    try:
        return f"hiredis {version('hiredis')}"
    except PackageNotFoundError:
        return "no hiredis"
