"""Packets that pass through a chain of three jobs, against plain tasks that hand on an argument, in turns.

    python -m benchmarks packets [--rounds 10] [--packets 600]

The plain sides run on `redis://`, in clients and workers that import nothing of this package: one task for each packet,
and three, each of which calls the next. The jobs run on `sidejob://`: each packet is read by the first job, which
writes it to the second, and by the second, which writes it to the third; with a commit a turn, and with one for a
hundred. The last task and the last job note each arrival. All was published or written while the worker stood still.

Each figure is the median over rounds, with the interval in which it lies with 95 % certainty.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import psycopg

from benchmarks.durable import Side, print_machine
from benchmarks.servers import POOLS, servers
from benchmarks.stamps import JOBS_SCHEMA
from benchmarks.transport import Client
from benchmarks.turns import Median, take_turns
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

SIDES = {
    "one task a packet": ("plain", "publish {packets}"),
    "three tasks a packet": ("plain", "pass {packets}"),
    "three jobs, commit_every=1": ("jobs", "write {packets} 1"),
    "three jobs, commit_every=100": ("jobs", "write {packets} 100"),
}
"""Whose client is asked, and for what."""


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks packets", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--packets", type=int, default=600, help="how many pass in each round")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        postgres, broker_url = stack.enter_context(servers(appendonly=False))
        upgrade(postgres.url, JOBS_SCHEMA)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        guard = stack.enter_context(Guard())
        processes = Processes(directory / "processes", guard)
        stack.callback(processes.kill_all)
        ours = f"sidejob:{broker_url.partition(':')[2]}"
        sides = {
            "plain": Side(broker_url, 0, None, directory),
            "jobs": Side(ours, 1, postgres.url, directory, schema=JOBS_SCHEMA),
        }
        clients = {name: Client(side, guard, plain=name == "plain") for name, side in sides.items()}
        looking = stack.enter_context(psycopg.connect(postgres.url, autocommit=True))
        print_machine(looking, sides["plain"].redis)
        for pool, (kind, concurrency) in POOLS.items():
            for side in sides.values():
                side.start_worker(processes, kind, concurrency)
            turns = {
                name: partial(_drain, sides[side], clients[side], ask.format(packets=given.packets), given.packets)
                for name, (side, ask) in SIDES.items()
            }
            _show(pool, take_turns(turns, given.rounds))
            for side in sides.values():
                assert side.worker is not None
                processes.end(side.worker)
        for name, side in sides.items():
            clients[name].close()
            side.close()


def _drain(side: Side, client: Client, ask: str, packets: int) -> float:
    """Have so many packets pass, and return how many a second arrived."""
    assert side.worker is not None
    side.worker.stop_signal()
    side.forget_stamps()
    client.ask(ask)
    rate = side.drained(packets)
    wait_until(lambda: not side.redis.exists("celery", "unacked"), timeout=30, message="all to be acknowledged")
    assert side.count() == packets, "each packet arrives once"
    return rate


def _show(pool: str, found: dict[str, list[float]]) -> None:
    print(f"\npackets a second, {pool}")
    one, three = (found[name] for name in list(SIDES)[:2])
    for name, rates in found.items():
        of = f"{Median.of_ratios(rates, one)} of one task, {Median.of_ratios(rates, three)} of three"
        print(f"  {name:30}{median(rates):8.0f}   {of}", flush=True)
