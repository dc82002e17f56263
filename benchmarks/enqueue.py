"""Making jobs against publishing plain tasks on the same Redis, in turns: one by one, and a thousand in one go.

    python -m benchmarks enqueue [--rounds 20]

Plain Celery is as it comes, in a process that imports nothing of this package; nobody listens. Shown are the medians
over rounds, the ratio inside a round with the interval in which it lies with 95 % certainty, and what one call takes of
the processors. Marks that are put off are written within the measurement of Postgres.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import psycopg

from benchmarks.durable import Side, print_machine
from benchmarks.idle import cpu_of, scalar
from benchmarks.servers import servers
from benchmarks.stamps import JOBS_SCHEMA
from benchmarks.transport import Client
from benchmarks.turns import Median, take_turns
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until

CALLS = 1000
PAIRS = {"publish": ("delay", "enqueue"), "together": ("Producer.batch", "enqueue_many")}
"""What a client is asked to do, and what that is for the plain one and for ours."""


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks enqueue", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args(arguments)
    with servers(appendonly=False) as (postgres, broker_url), tempfile.TemporaryDirectory() as name, Guard() as guard:
        upgrade(postgres.url, JOBS_SCHEMA)
        urls = None, postgres.url
        sides = [Side(broker_url, number, url, Path(name), schema=JOBS_SCHEMA) for number, url in enumerate(urls)]
        clients = [Client(side, guard, plain=side.schema is None) for side in sides]
        with psycopg.connect(postgres.url, autocommit=True) as looking:
            bench = Bench(sides, clients, looking, postgres.pid)
            print_machine(looking, sides[0].redis)
            for verb, names in PAIRS.items():
                bench.compare(verb, names, given.rounds)
        for client, side in zip(clients, sides, strict=True):
            client.close()
            side.close()


class Bench:
    """A plain side, one with jobs, a client each, and what they took of the processors."""

    def __init__(
        self, sides: list[Side], clients: list[Client], looking: psycopg.Connection[tuple[int]], postmaster: int
    ) -> None:
        self._sides = sides
        self._clients = clients
        self._looking = looking
        self._postmaster = postmaster
        self._took_us: dict[str, list[float]] = {}

    def compare(self, verb: str, names: tuple[str, str], rounds: int) -> None:
        """Take turns, and print one line for each side."""
        turns = {name: partial(self._call, number, verb, name) for number, name in enumerate(names)}
        found = take_turns(turns, rounds)
        plain, ours = names
        print(f"\n{ours} is {Median.of_ratios(found[ours], found[plain])} of {plain}")
        for name, rates in found.items():
            client, store = (median(self._took_us[f"{name}, {part}"]) for part in ("client", "Postgres"))
            print(f"  {name:14}{median(rates):8.0f} a second, client {client:5.0f} us, Postgres {store:5.0f} us")

    def _call(self, number: int, verb: str, name: str) -> float:
        side, client = self._sides[number], self._clients[number]
        before = cpu_of(client.pid), cpu_of(self._postmaster)
        rate = client.ask(verb, CALLS)
        wait_until(lambda: side.redis.llen("celery") >= CALLS, message="Redis to have all")
        if side.schema is not None:
            wait_until(lambda: not self._count("messages WHERE published_at IS NULL"), message="all to be marked")
            assert self._count("messages") == CALLS
        for part, pid, then in zip(("client", "Postgres"), (client.pid, self._postmaster), before, strict=True):
            self._took_us.setdefault(f"{name}, {part}", []).append((cpu_of(pid) - then) / CALLS * 1e6)
        side.forget_messages()
        self._looking.execute(f"DELETE FROM {JOBS_SCHEMA}.jobs")
        return rate

    def _count(self, what: str) -> int:
        return scalar(self._looking, f"SELECT count(*) FROM {JOBS_SCHEMA}.{what}")
