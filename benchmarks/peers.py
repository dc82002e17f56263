"""Celery on `redis://` and on `sidejobpg://` against procrastinate and pgqueuer, in turns on one Postgres.

    pip install procrastinate 'pgqueuer[asyncpg]'
    python -m benchmarks peers [--rounds 6] [--tasks 1000]

Plain Celery on `redis://`, the unit; plain Celery on `sidejobpg://`; durable tasks that may be repeated where that
broker is the store; procrastinate and pgqueuer, each in a database of its own of the same durable Postgres. All send
from one thread. Those of Celery run in prefork with two processes. A worker of a peer is one process that runs
coroutines, procrastinate's two at a time and pgqueuer's up to 20, the least that it allows; its other settings are as
they come. The trivial body awaits nothing, so that no two coroutines of a process run it at once. The rest is as in
`transport`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from benchmarks.idle import scalar
from benchmarks.servers import POOLS
from benchmarks.stamped import Watched
from benchmarks.transport import Bench
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, environment

PEERS = {
    "procrastinate": ("procrastinate_jobs", "status = 'todo'", "status IN ('todo', 'doing')"),
    "pgqueuer": ("pgqueuer", "status = 'queued'", "true"),
}
"""The table of each, which of its rows wait, and which have not ended."""


def main(arguments: list[str]) -> int | None:
    """Measure and print; bounds are those of `transport`, and are not judged here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tasks", type=int, default=1000, help="how many a drain has")
    given = parser.parse_args(arguments)
    try:
        versions = ", ".join(f"{name} {version(name)}" for name in (*PEERS, "asyncpg"))
    except PackageNotFoundError as missing:
        print(f"{missing.name} is not installed: pip install procrastinate 'pgqueuer[asyncpg]'", file=sys.stderr)
        return 2
    peers: dict[str, Callable[[str, Path], Watched]] = {name: partial(Peer, name) for name in PEERS}
    with Bench.opened(["stock", "postgres", "pg_requeue"], peers=peers, bounds={}) as bench:
        print(versions)
        print("Celery: two processes of prefork. The others: one process with coroutines; procrastinate two at a time,")
        print("fetched one by one, as it comes; pgqueuer up to 20, the least at its batch size of 10, as it comes.")
        bench.publish(given.rounds)
        bench.together(given.rounds)
        with bench.workers(*POOLS["prefork -c 2"]):
            bench.drain("prefork -c 2", given.rounds, given.tasks)
            bench.latency(given.rounds)
    return None


class Peer(Watched):
    """A library with a queue in a Postgres, in a database of its own, and perhaps a worker."""

    def __init__(self, name: str, server_url: str, directory: Path) -> None:
        super().__init__(directory / f"stamps_{name}")
        self._name = name
        self._table, self._waiting, self._not_ended = PEERS[name]
        self._url = installed(name, server_url)
        self._looking = psycopg.connect(self._url, autocommit=True)

    @property
    def client(self) -> list[str]:
        """The program that sends, as `python -m` takes it."""
        return self._program("client")

    @property
    def env(self) -> dict[str, str]:
        """What a process of this side needs."""
        return {"STAMPS": str(self.stamps)}

    def start_worker(self, processes: Processes, pool: str, concurrency: int) -> None:
        """Start a worker of coroutines, whatever the pool, and wait until it runs what it is given."""
        assert concurrency == 2
        self.worker = processes.start([sys.executable, "-m", *self._program("worker")], env=self.env, name=self._name)
        self.forget_stamps()
        subprocess.run(
            [sys.executable, "-m", *self.client], check=True, env=environment(self.env), input="publish 1\n",
            text=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(lambda: self.count() >= 1, timeout=60, message=f"the worker of {self._name} to be ready")

    def waiting(self) -> int:
        """How many jobs wait."""
        return scalar(self._looking, f"SELECT count(*) FROM {self._table} WHERE {self._waiting}")

    def is_quiet(self) -> bool:
        """Whether all jobs have ended."""
        return not scalar(self._looking, f"SELECT count(*) FROM {self._table} WHERE {self._not_ended}")

    def forget_messages(self) -> None:
        """Delete the jobs."""
        self._looking.execute(f"DELETE FROM {self._table}")

    def close(self) -> None:
        """Look no more; its worker is not ended."""
        self._looking.close()

    def _program(self, verb: str) -> list[str]:
        return [f"benchmarks.{self._name}_app", verb, self._url]


def installed(name: str, server_url: str) -> str:
    """Make a database of this library's own with its tables, and return its URL."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = urlsplit(server_url)._replace(path=f"/{name}").geturl()
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}_app", "install", url], check=True, env=environment({}))
    return url
