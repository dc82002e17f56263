"""Admissions of a capacity pool: how many a second with one shard and with eight, and how soon a call is refused.

Threads in several processes make jobs of a pool that never fills, then of one that is full; jobs without a pool are
made beside them, in turns. `python -m benchmarks capacity [--seconds N] [--processes N]`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
from celery import Celery

from celery_sidejob import CapacityPool, Overloaded, SideJob, embedded
from celery_sidejob.store.schema.migrate import upgrade

THREADS = 4
KINDS = ("no pool", "1 shard", "8 shards", "full")
POOLS = {
    "1 shard": CapacityPool("one", 1_000_000),
    "8 shards": CapacityPool("eight", 1_000_000, shards=8),
    "full": CapacityPool("full", 1),
}


def main(arguments: list[str]) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks capacity", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with embedded.Postgres(durable=True) as server:
        upgrade(server.url)
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with multiprocessing.get_context("spawn").Pool(options.processes) as processes:
            for _ in range(options.rounds):
                for kind in KINDS:
                    calls = [(server.url, kind, options.seconds)] * options.processes
                    found = [seconds for part in processes.starmap(calls_of, calls) for seconds in part]
                    taken[kind] += found
                    rates[kind].append(len(found) / options.seconds)
        with psycopg.connect(server.url) as connection:
            wrong = connection.execute(
                "SELECT p.name FROM sidejob.capacity_pools p WHERE"
                " (SELECT sum(used) FROM sidejob.capacity_shards c WHERE c.pool = p.name)"
                " <> (SELECT count(*) FROM sidejob.messages m WHERE m.pool = p.name AND m.pool_shard IS NOT NULL)"
            ).fetchall()
        assert wrong == [], wrong
    print(f"{'calls of ' + str(options.processes * THREADS) + ' clients':28}{'a second':>10}{'p50 ms':>9}{'p99 ms':>9}")
    for kind in KINDS:
        cuts = statistics.quantiles(taken[kind], n=100)
        print(f"{kind:28}{statistics.median(rates[kind]):10.0f}{cuts[49] * 1000:9.2f}{cuts[98] * 1000:9.2f}")


def calls_of(url: str, kind: str, seconds: float) -> list[float]:
    """Make jobs of one kind from some threads for a while; returns how long each call took."""
    app = Celery("capacity", broker="memory://", set_as_current=False)
    app.conf.update(sidejob_database_url=url, task_ignore_result=True)
    sidejob = SideJob(app)
    task = sidejob.task(noop, name="noop", capacity=POOLS.get(kind))

    def client(_: int) -> list[float]:
        found = []
        if kind == "full":
            once(task)
        once(task)
        until = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < until:
            once(task)
            found.append(time.perf_counter() - begun)
        return found

    try:
        with ThreadPoolExecutor(THREADS) as threads:
            return [one for part in threads.map(client, range(THREADS)) for one in part]
    finally:
        sidejob.close()
        app.close()


def once(task: Any) -> None:
    """Make one job, or be refused."""
    with suppress(Overloaded):
        task.enqueue()


def noop(job: Any) -> None:
    """Do nothing."""
