"""Publications to few and to many subscribers, in turns.

    python -m benchmarks publications [--rounds 10] [--subscribers 10000]

In each turn every subscriber gets one packet and is woken from its rest: by publications to 10 of them each, or to
100, 1,000 or all. The broker is Redis, and nobody listens to it, so all doorbells wait there. Marks that are put off
are written within the measurement. Shown are the medians over rounds, the ratio inside a round with the interval in
which it lies with 95 % certainty, and what one subscriber takes of the processors.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import psycopg
import redis

from benchmarks.durable import print_machine
from benchmarks.idle import cpu_of
from benchmarks.servers import servers
from benchmarks.turns import Median, take_turns
from celery_sidejob import Job
from tests.tools.apps import make_app

SIZES = (10, 100, 1000, 10_000, 100_000)
BATCH = 1000

AT_REST = """
SET search_path = sidejob; TRUNCATE packets, askings, messages;
UPDATE jobs SET status = 'completed', wakes_taken = wakes WHERE status = 'queued'"""
"""Lets all jobs rest, as if their runs had read their packets."""


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks publications", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--subscribers", type=int, default=10_000, help="how many get a packet in each turn")
    given = parser.parse_args(arguments)
    with servers(appendonly=False) as (postgres, broker_url):
        bench = Bench(postgres.url, postgres.pid, broker_url, given.subscribers)
        try:
            print_machine(bench.looking, bench.broker)
            bench.publish(given.rounds)
        finally:
            bench.close()


class Bench:
    """A client that publishes, and what it and Postgres take of the processors."""

    def __init__(self, database_url: str, postmaster: int, broker_url: str, subscribers: int) -> None:
        self.looking = psycopg.connect(database_url, autocommit=True)
        self.broker = redis.Redis.from_url(broker_url)
        self._app = make_app("publications", broker=broker_url, sidejob_database_url=database_url)
        self._task = self._app.sidejob.task(_rest, name="publications.rest", inports=["*"])
        self._postmaster = postmaster
        self._subscribers = subscribers
        self._took_us: dict[tuple[int, str], list[float]] = {}
        self._call_s: dict[int, float] = {}

    def close(self) -> None:
        """Close what is open."""
        self._app.sidejob.close()
        self._app.close()
        self.looking.close()
        self.broker.close()

    def publish(self, rounds: int) -> None:
        """Take turns, and print one line for each size."""
        sizes = [size for size in SIZES if size <= self._subscribers]
        for size in sizes:
            for first in range(0, self._subscribers, BATCH):
                self._app.sidejob.enqueue_many(
                    [self._subscriber(size, number) for number in range(first, first + BATCH)]
                )
        self._rest()
        found = take_turns({str(size): partial(self._publish, size) for size in sizes}, rounds)
        for size in sizes:
            rates, few = found[str(size)], found[str(sizes[0])]
            client, store = (median(self._took_us[size, part]) for part in ("client", "Postgres"))
            ratio = Median.of_ratios(few, rates)
            print(
                f"  to {size:6} each: {median(rates):7.0f} packets a second, {ratio} of the time of one to {sizes[0]};"
                f" client {client:4.0f} us, Postgres {store:4.0f} us; a call {self._call_s[size]:.3f} s", flush=True,
            )  # fmt: skip

    def _publish(self, size: int) -> float:
        """Publish to all in groups of this size, and return the packets a second."""
        before = cpu_of(self._postmaster), time.process_time()
        began = time.perf_counter()
        for number in range(self._subscribers // size):
            assert self._app.sidejob.publish(f"/of/{size}/{number}", number) == size
        self._call_s[size] = (time.perf_counter() - began) / (self._subscribers // size)
        while self._app.sidejob.poll().publications:  # to more subscribers than the publisher serves itself
            pass
        self._app.sidejob.runtime.connections.write_behind_now()
        rate = self._subscribers / (time.perf_counter() - began)
        took = {"client": time.process_time() - before[1], "Postgres": cpu_of(self._postmaster) - before[0]}
        for part, taken_s in took.items():
            self._took_us.setdefault((size, part), []).append(taken_s / self._subscribers * 1e6)
        rung = self.broker.llen("celery")
        assert rung == self._subscribers, f"{rung} jobs were rung for"
        self._rest()
        return rate

    def _subscriber(self, size: int, number: int) -> dict[str, Any]:
        channel = f"/of/{size}/{number // size}"
        return {"task": self._task, "inports": {"in": {"channels": [channel]}}}

    def _rest(self) -> None:
        self.looking.execute(AT_REST)
        self.looking.execute("VACUUM ANALYZE")
        self.broker.delete("celery")  # not all: the sweeper would look for everything that was ever published


def _rest(job: Job) -> None:
    pass
