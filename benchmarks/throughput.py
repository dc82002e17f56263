"""Runs, packets and enqueues per second, each as a ratio to plain Celery's tasks on the same Redis, in turns.

A plain task is a message in Redis; a job is rows in Postgres as well: two durable commits for each call and two for
each run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import redis

from benchmarks.turns import take_turns
from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

POOLS = {"prefork -c 2": ("prefork", 2), "solo": ("solo", 1)}


def main(arguments: list[str]) -> None:
    """Measure and print one line for each comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks throughput", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=1000, help="tasks, jobs and packets of each measurement")
    given = parser.parse_args(arguments)
    with servers() as (postgres, broker_url):
        database_url = postgres.url
        os.environ.update(DATABASE_URL=database_url, BROKER_URL=broker_url)
        app = import_module("benchmarks.app")
        bench = Bench(app, broker_url, given.runs)
        try:
            for name, (pool, concurrency) in POOLS.items():
                with worker(pool, concurrency, database_url, broker_url):
                    bench.compare_runs(name, given.rounds)
            bench.compare_enqueues(given.rounds)
        finally:
            app.sidejob.runtime.connections.close()
        bench.report()


@contextmanager
def servers(*, appendonly: bool = True) -> Iterator[tuple[embedded.Postgres, str]]:
    """A Postgres with its default, durable settings and our schema, and the URL of a Valkey."""
    with embedded.Postgres(durable=True) as postgres, embedded.Valkey(appendonly=appendonly) as valkey:
        upgrade(postgres.url)
        yield postgres, valkey.url


@contextmanager
def worker(pool: str, concurrency: int, database_url: str, broker_url: str) -> Iterator[None]:
    """A worker for both queues."""
    with tempfile.TemporaryDirectory() as directory, Guard() as guard:
        processes = Processes(Path(directory) / "processes", guard)
        try:
            processes.start_worker(
                "benchmarks.app", env={"DATABASE_URL": database_url, "BROKER_URL": broker_url}, pool=pool,
                concurrency=concurrency, queues=["celery", "jobs"],
            )  # fmt: skip
            yield
        finally:
            processes.kill_all()


class Bench:
    """Takes turns between plain Celery and us, and keeps the figures."""

    def __init__(self, app: Any, broker_url: str, runs: int) -> None:
        self._app = app
        self._sidejob = app.sidejob
        self._redis = redis.Redis.from_url(broker_url)
        self._runs = runs
        self._rates: dict[tuple[str, str], list[float]] = {}
        self._ratios: dict[tuple[str, str], list[float]] = {}

    def compare_runs(self, pool: str, rounds: int) -> None:
        """Drain queues that were filled while the worker did not listen."""
        sides: dict[str, Callable[[], float]] = {
            "plain tasks": self._drain_tasks,
            "runs": self._drain_jobs,
            "packets, commit_every=1": lambda: self._drain_packets(1),
            "packets, commit_every=100": lambda: self._drain_packets(100),
        }
        self._take_turns(pool, sides, rounds)

    def compare_enqueues(self, rounds: int) -> None:
        """Ask without anybody who listens."""
        sides: dict[str, Callable[[], float]] = {
            "plain delay()": lambda: self._timed(200, lambda: [self._app.plain.delay() for _ in range(200)]),
            "enqueue()": lambda: self._timed(200, lambda: [self._app.noop.enqueue() for _ in range(200)]),
            "enqueue_many(1000)": lambda: self._timed(1000, self._enqueue_many),
        }
        self._take_turns("enqueue", sides, rounds)

    def report(self) -> None:
        """Print medians: a second, and the ratio to plain Celery inside a round."""
        print(f"{'where':14} {'what':28} {'per second':>12} {'of plain':>10}")
        for (where, what), rates in self._rates.items():
            print(f"{where:14} {what:28} {median(rates):12.0f} {median(self._ratios[where, what]):10.2f}")

    # ------------------------------------------------------------------------------------------------------------

    def _take_turns(self, where: str, sides: dict[str, Callable[[], float]], rounds: int) -> None:
        found = take_turns(sides, rounds)
        base = found[next(iter(sides))]
        for what, rates in found.items():
            self._rates[where, what] = rates
            self._ratios[where, what] = [one / other for one, other in zip(rates, base, strict=True)]

    def _timed(self, count: int, work: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        work()
        rate = count / (time.perf_counter() - begun)
        self._empty()
        return rate

    def _enqueue_many(self) -> None:
        self._sidejob.enqueue_many({"task": "noop"} for _ in range(1000))

    def _drain_tasks(self) -> float:
        def fill() -> None:
            with self._app.app.producer_pool.acquire() as producer:
                for _ in range(self._runs):
                    self._app.plain.apply_async(producer=producer)

        return self._drained("celery", fill, lambda: not self._redis.llen("celery") and not self._redis.hlen("unacked"))

    def _drain_jobs(self) -> float:
        def fill() -> None:
            self._sidejob.enqueue_many({"task": "noop"} for _ in range(self._runs))

        return self._drained("jobs", fill, self._nothing_owed)

    def _drain_packets(self, commit_every: int) -> float:
        def fill() -> None:
            job = self._sidejob.enqueue("packets", (commit_every,))
            with self._sidejob.port_options(notify=False):
                job.input("a").write_many(range(self._runs))

        return self._drained("jobs", fill, self._nothing_owed)

    def _nothing_owed(self) -> bool:
        from celery_sidejob.store import depths

        return not depths.read(self._sidejob.runtime.connections)

    def _drained(self, queue: str, fill: Callable[[], None], is_empty: Callable[[], bool]) -> float:
        control = self._app.app.control
        assert control.cancel_consumer(queue, reply=True, timeout=5)
        fill()
        begun = time.perf_counter()
        control.add_consumer(queue)
        wait_until(is_empty, timeout=300, interval=0.005, message=f"queue {queue} to be drained")
        rate = self._runs / (time.perf_counter() - begun)
        self._empty()
        return rate

    def _empty(self) -> None:
        self._redis.delete("celery", "jobs")
        import psycopg

        with psycopg.connect(self._sidejob.settings.database_url, autocommit=True) as connection:
            connection.execute("DELETE FROM sidejob.jobs")
