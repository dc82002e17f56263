"""Celery's results on `sidejobpg://` against Redis and `db+postgresql`, in turns: trips, drains, chords, many waits.

    python -m benchmarks results [--rounds 6] [--tasks 2000] [--parts 1000] [--waiting 10000] [--only trip,chord]

Plain Celery with messages and results in Redis, the unit, in processes that import nothing of this package; plain and
durable tasks with both on `sidejobpg://`, the durable ones as they come and with `on_lost="requeue"`; and plain tasks
on `sidejobpg://` with Celery's own results in SQLAlchemy (`db+postgresql`). Redis writes nothing to disk, and Postgres
is durable; each side has a database and a worker with two processes.

A trip is `delay().get()`, every 20 ms. A drain begins with a worker's first look and ends with the last body; each
keeps a result. `waiting` has a hundred threads wait for 10,000 results, counts the sessions of their process in
Postgres, and is timed from the worker's first look. `million` compares what it takes to keep and to get a result beside
a million others and beside a few. Each figure is the median over rounds, and a ratio is that inside a round, as in
`transport`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import psycopg
from celery import Celery, states

from benchmarks.durable import Bound
from benchmarks.idle import cpu_of, scalar
from benchmarks.servers import servers
from benchmarks.stamped import Stamped
from benchmarks.transport import Client
from benchmarks.turns import Median, take_turns
from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

APP = "benchmarks.results_app"
REDIS = "redis"
TITLES = {
    REDIS: "Redis, plain",
    "plain": "sidejobpg://, plain",
    "requeue": "sidejobpg://, may be repeated",
    "durable": "sidejobpg://, durable",
    "db": "db+postgresql, plain",
}
BOUNDS = {
    ("trip", "plain"): Bound(1.5, most=True),
    ("drain", "plain"): Bound(1.5),
    ("drain", "durable"): Bound(1.2),
    ("chord", "plain"): Bound(1.2, most=True),
    ("keep", "full"): Bound(1.1, most=True),
    ("get", "full"): Bound(1.1, most=True),
}
SECTIONS = ("trip", "drain", "chord", "waiting", "million")
TRIPS = 60
SLOW_TRIPS = 5
"""How many trips a round has; fewer where each waits for a poll of half a second."""
ROWS = 1_000_000
OPERATIONS = 300
OURS = "application_name = 'celery_sidejob_results'"


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks results", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tasks", type=int, default=2000, help="how many a drain has")
    parser.add_argument("--parts", type=int, default=1000, help="how many a chord has")
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--sides", default=",".join(TITLES), help=f"of {', '.join(TITLES)}")
    given = parser.parse_args(arguments)
    wanted, sides = given.only.split(","), given.sides.split(",")
    if unknown := (set(wanted) - set(SECTIONS)) | (set(sides) - set(TITLES)):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    with ExitStack() as stack:
        postgres, redis_url = stack.enter_context(servers(appendonly=False))
        if set(wanted) - {"million"}:
            bench = stack.enter_context(Bench.opened(postgres, redis_url, sides))
            if "trip" in wanted:
                bench.trip(given.rounds)
            if "drain" in wanted:
                bench.drain(given.rounds, given.tasks)
            if "chord" in wanted:
                bench.chord(given.rounds, given.parts)
            if "waiting" in wanted:
                bench.waiting(given.rounds, given.waiting)
        if "million" in wanted:
            million(postgres.url, given.rounds)


class Side(Stamped):
    """Where messages and results are, and the worker there."""

    def __init__(self, name: str, postgres_url: str, redis_url: str, directory: Path) -> None:
        super().__init__(directory / f"stamps_{name}")
        self.name = name
        self._env = {"STAMPS": str(self.stamps)}
        if name == REDIS:
            self._env |= {"BROKER_URL": redis_url, "RESULT_BACKEND": redis_url}
            return
        self.url = made(postgres_url, name)
        url = self.url.replace("postgresql:", "sidejobpg:", 1)
        if name == "plain":
            self._env |= {"BROKER_URL": url, "RESULT_BACKEND": url}
        elif name == "db":
            self._env |= {
                "BROKER_URL": url, "RESULT_BACKEND": self.url.replace("postgresql:", "db+postgresql+psycopg:", 1)
            }  # fmt: skip
        else:
            lost = "requeue" if name == "requeue" else "dead"
            alone = "sidejobpg://"
            self._env |= {"BROKER_URL": alone, "RESULT_BACKEND": alone, "DATABASE_URL": self.url, "ON_LOST": lost}

    @property
    def client(self) -> list[str]:
        """The program that calls and waits."""
        return [APP]

    @property
    def env(self) -> dict[str, str]:
        """What a process of this side needs."""
        return self._env

    def start_worker(self, processes: Processes, pool: str, concurrency: int) -> None:
        """Start a worker, and wait until it is ready."""
        self.worker = processes.start_worker(APP, env=self.env, pool=pool, concurrency=concurrency, ready_timeout=120)


class Bench:
    """The sides, with a worker and a client each."""

    def __init__(self, sides: Mapping[str, Side], clients: Mapping[str, Client], postmaster: int) -> None:
        self._sides, self._clients, self._postmaster = sides, clients, postmaster
        self._took_us: dict[str, list[tuple[float, float]]] = {}

    @classmethod
    @contextmanager
    def opened(cls, postgres: embedded.Postgres, redis_url: str, names: Sequence[str]) -> Iterator[Bench]:
        """Start workers and clients, which end with the block."""
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            guard = stack.enter_context(Guard())
            processes = Processes(directory / "processes", guard)
            stack.callback(processes.kill_all)
            sides, clients = {}, {}
            for name in (name for name in TITLES if name in names):
                side = sides[name] = Side(name, postgres.url, redis_url, directory)
                side.start_worker(processes, "prefork", 2)
                clients[name] = Client(side, guard, plain=name == REDIS)
                stack.callback(clients[name].close)
            yield cls(sides, clients, postgres.pid)

    def trip(self, rounds: int) -> None:
        """From the call to the result, one call every 20 ms."""
        counts = {name: SLOW_TRIPS if name == "db" else TRIPS for name in self._sides}
        turns = {name: partial(client.ask, "trip", counts[name]) for name, client in self._clients.items()}
        show("trip", "us, p50 of delay().get()", turns, rounds)
        for name, client in self._clients.items():
            print(f"  {TITLES[name]:32} p99 {client.ask('late'):9.0f} us")

    def drain(self, rounds: int, tasks: int) -> None:
        """Tasks that were published while the worker stood still."""
        turns = {name: partial(self._drain, name, tasks) for name in self._sides}
        show("drain", "a second, drained by prefork -c 2", turns, rounds)
        for name, took in self._took_us.items():
            worker, store = (median(part) for part in zip(*took, strict=True))
            print(f"  {TITLES[name]:32} worker {worker:5.0f} us, Postgres {store:5.0f} us of a processor for each")

    def _drain(self, name: str, tasks: int) -> float:
        side = self._sides[name]
        assert side.worker is not None
        side.worker.stop_signal()
        side.forget_stamps()
        self._clients[name].ask("publish", tasks)
        pids = side.worker.pid, self._postmaster
        before = [cpu_of(pid) for pid in pids]
        rate = side.drained(tasks)
        self._clients[name].ask("trip", 1)  # the last results are kept before the next side has its turn
        worker, store = ((cpu_of(pid) - then) / tasks * 1e6 for pid, then in zip(pids, before, strict=True))
        self._took_us.setdefault(name, []).append((worker, store))
        return rate

    def chord(self, rounds: int, parts: int) -> None:
        """From the call of a chord to the result of its body."""
        turns = {name: partial(client.ask, "chord", parts) for name, client in self._clients.items()}
        found = show("chord", f"s, a chord of {parts}", turns, rounds)
        if "db" in found and "plain" in found:
            print(
                f"  {TITLES['db']}, of {TITLES['plain']}: {Median.of_ratios(found['db'], found['plain'])}, at least 10"
            )

    def waiting(self, rounds: int, results: int) -> None:
        """Many results that are waited for at once; `db` would poll each of them."""
        turns = {name: partial(self._waiting, name, results) for name in self._sides if name != "db"}
        show("waiting", f"s, {results} results for 100 threads", turns, rounds)

    def _waiting(self, name: str, results: int) -> float:
        side, client = self._sides[name], self._clients[name]
        assert side.worker is not None
        side.worker.stop_signal()
        client.ask("expect", results)
        if name != REDIS:
            self._count_sessions(side, client)
        begun = time.monotonic()
        side.worker.cont()
        assert client.ask("joined") == results
        return time.monotonic() - begun

    def _count_sessions(self, side: Side, client: Client) -> None:
        """Print how many sessions a process has whose threads wait."""
        with psycopg.connect(side.url, autocommit=True) as looking:
            wait_until(lambda: scalar(looking, f"SELECT count(*) FROM pg_stat_activity WHERE {OURS}") > 0)
            time.sleep(2.0)  # for sessions that should not come
            ports = [one.laddr.port for one in psutil.Process(client.pid).net_connections() if one.laddr]
            ours = f"client_port IN ({','.join(map(str, ports))})"
            every = scalar(looking, f"SELECT count(*) FROM pg_stat_activity WHERE {ours}")
            listens = scalar(looking, f"SELECT count(*) FROM pg_stat_activity WHERE {ours} AND {OURS}")
        print(f"  {TITLES[side.name]}: {listens} session waits, of {every} that the process has", flush=True)


def million(postgres_url: str, rounds: int) -> None:
    """Keep and get results beside a million others, and beside a few."""
    ids: dict[str, list[str]] = {"empty": [], "full": []}
    apps = {}
    for name in ids:
        url = made(postgres_url, name)
        apps[name] = Celery(backend=url.replace("postgresql:", "sidejobpg:", 1), set_as_current=False)
        apps[name].backend.store_result("one", {"value": 1}, states.SUCCESS)
        if name == "full":
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(
                    "INSERT INTO sidejob.results (key, state, body, expires_at)"
                    " SELECT 'task:' || gen_random_uuid(), state, body, now() + interval '1 day' + n * interval '1 ms'"
                    f" FROM sidejob.results, generate_series(1, {ROWS}) AS n"
                )
                connection.execute("VACUUM ANALYZE sidejob.results")
                connection.execute("CHECKPOINT")  # which the rows themselves would have spread over minutes
    show("keep", "us, a result is kept", {name: partial(keep, apps[name], ids[name]) for name in ids}, rounds)
    show("get", "us, a result is read", {name: partial(get, apps[name], ids[name]) for name in ids}, rounds)


def keep(app: Celery, ids: list[str]) -> float:
    """Keep some results."""
    ids[:] = [str(uuid4()) for _ in range(OPERATIONS)]
    begun = time.perf_counter()
    for task_id in ids:
        app.backend.store_result(task_id, {"value": 1}, states.SUCCESS)
    return 1e6 * (time.perf_counter() - begun) / OPERATIONS


def get(app: Celery, ids: list[str]) -> float:
    """Get these results."""
    begun = time.perf_counter()
    for task_id in ids:
        assert app.AsyncResult(task_id).get(timeout=10) == {"value": 1}
    return 1e6 * (time.perf_counter() - begun) / OPERATIONS


def show(name: str, unit: str, turns: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure in turns, and print each side's median and what it is of the first side's."""
    found = take_turns(turns, rounds)
    first = next(iter(found))
    print(f"\n{unit}, at a load of {os.getloadavg()[0]:.0f}")
    for side, figures in found.items():
        text = f"  {TITLES.get(side, side):32}{median(figures):10.2f}   {Median.of_ratios(figures, found[first])}"
        bound = BOUNDS.get((name, side))
        if bound is not None:
            met = "met" if bound.met_by(Median.of_ratios(figures, found[first])) else "MISSED"
            text += f"   {'at most' if bound.most else 'at least'} {bound.limit:g}: {met}"
        print(text, flush=True)
    return found


def made(postgres_url: str, database: str) -> str:
    """Make a database with our schema, and return its URL."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}_side")
    url = urlsplit(postgres_url)._replace(path=f"/{database}_side").geturl()
    upgrade(url)
    return url
