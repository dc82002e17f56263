"""A port of many packets that is read whole: by `read_many`, by `list(port)` and by a loop of `read()`, in turns.

    python -m benchmarks reads [--rounds 5] [--packets 20000]

A client reads, and a run does, in this process. The figure of a run is without its commit, which consumes the packets.
Shown are the medians over rounds, and the ratio to the loop inside a round, with the interval in which it lies with
95 % certainty.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import redis

from benchmarks.durable import print_machine
from benchmarks.servers import servers
from benchmarks.turns import Median, take_turns
from celery_sidejob import Port
from tests.tools.in_process import Stage

BATCH = 1000

WAYS: dict[str, Callable[[Port, int], list[Any]]] = {
    "read_many": lambda port, packets: port.read_many(packets),
    "list(port)": lambda port, packets: list(port),
    "a loop of read()": lambda port, packets: [port.read() for _ in range(packets)],
}


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks reads", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--packets", type=int, default=20_000, help="how many are on the port")
    given = parser.parse_args(arguments)
    with servers(appendonly=False) as (postgres, broker_url):
        stage = Stage(postgres.url)
        try:
            with stage.connect() as looking, redis.Redis.from_url(broker_url) as broker:
                print_machine(looking, broker)
            for reader, read in {"a client": _by_client, "a run": _by_run}.items():
                sides = {name: partial(read, stage, way, given.packets) for name, way in WAYS.items()}
                _show(f"{reader} reads {given.packets} packets, seconds", take_turns(sides, given.rounds))
        finally:
            stage.close()


def _by_client(stage: Stage, way: Callable[[Port, int], list[Any]], packets: int) -> float:
    return _timed(_filled(stage.job(), packets).input("many"), way, packets)


def _by_run(stage: Stage, way: Callable[[Port, int], list[Any]], packets: int) -> float:
    took: list[float] = []
    job = stage.job(lambda job: took.append(_timed(job.input("many"), way, packets)))
    assert stage.run(_filled(job, packets)) == "completed"
    return took[0]


def _filled(job: Any, packets: int) -> Any:
    for first in range(0, packets, BATCH):
        job.input("many").write_many(range(first, min(first + BATCH, packets)))
    return job


def _timed(port: Port, way: Callable[[Port, int], list[Any]], packets: int) -> float:
    began = time.perf_counter()
    found = way(port, packets)
    took_s = time.perf_counter() - began
    assert found == list(range(packets)), "each packet is read once, in order"
    return took_s


def _show(title: str, found: dict[str, list[float]]) -> None:
    print(f"\n{title}")
    for name, seconds in found.items():
        of_loop = Median.of_ratios(seconds, found["a loop of read()"])
        print(f"  {name:20}{median(seconds):8.2f}   {of_loop} of the loop", flush=True)
