"""Goodput at one and at ten times the capacity: a capacity pool, and plain Celery beside it.

    python -m benchmarks overload [--rounds 4] [--seconds 8]

A worker with four processes runs bodies of a twentieth of a second: at most 80 a second. Clients call at that rate, and
at ten times of it, whatever becomes of their calls; one that a full pool refuses is not repeated. A call is served well
if its body ends within a second, and the goodput is how many are, per second. The sides take turns, each time with a
new worker and an empty broker. With a pool the tasks are durable ones, without it they are plain Celery's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psycopg
import redis

from benchmarks.idle import scalar, started_processes
from benchmarks.servers import servers
from benchmarks.turns import Median, take_turns
from tests.tools.waiting import wait_until
from tests.tools.workers import environment

CONCURRENCY = 4
BODY_S = 0.05
LIMIT = 4 * CONCURRENCY
CAPACITY = CONCURRENCY / BODY_S
PATIENCE_S = 1.0
CLIENTS, THREADS = 2, 16
TIMES = (1, 10)
GOAL = 0.95


def main(arguments: list[str]) -> int:
    """Measure and print; 1 if a pool has a lower goodput at ten times the capacity than `GOAL` of that at one times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks overload", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args(arguments)
    with servers() as (postgres, broker_url):
        plain = {"BROKER_URL": broker_url}
        pool = {**plain, "DATABASE_URL": postgres.url, "LIMIT": str(LIMIT)}
        sides = {
            f"{name}, {times} times": partial(goodput, env, times=times, seconds=given.seconds)
            for name, env in (("pool", pool), ("plain", plain))
            for times in TIMES
        }
        found = take_turns(sides, given.rounds)
    for side, figures in found.items():
        print(f"{side:16}{Median.of(figures)} served well a second")
    ratios = {
        name: Median.of_ratios(found[f"{name}, 10 times"], found[f"{name}, 1 times"]) for name in ("pool", "plain")
    }
    for name, ratio in ratios.items():
        print(f"{name:6} at ten times the capacity, of that at one times: {ratio}")
    return int(ratios["pool"].upper < GOAL)


def goodput(env: Mapping[str, str], *, times: int, seconds: float) -> float:
    """Have a new worker and clients that call at so many times its capacity; how many calls a second it serves well."""
    with tempfile.TemporaryDirectory() as directory, started_processes() as processes:
        waits = Path(directory) / "waits"
        env = {**env, "WAITS": str(waits), "BODY_S": str(BODY_S)}
        processes.start_worker("benchmarks.overload_app", env=env, pool="prefork", concurrency=CONCURRENCY)
        given = f"{times * CAPACITY / CLIENTS}, {seconds}, {THREADS}"
        program = f"from benchmarks.overload_app import call; print(call({given}))"
        clients = [
            subprocess.Popen([sys.executable, "-c", program], env=environment(env), stdout=subprocess.PIPE, text=True)
            for _ in range(CLIENTS)
        ]
        called = sum(int(client.communicate()[0]) for client in clients)
        assert called > 0.9 * times * CAPACITY * seconds, f"only {called} calls were made"
        time.sleep(PATIENCE_S)  # what is served later is not served well
        served = sum(wait <= PATIENCE_S for wait in memoryview(waits.read_bytes()).cast("d"))
        if "DATABASE_URL" in env:  # the pool is empty at the begin of the next turn
            with psycopg.connect(env["DATABASE_URL"], autocommit=True) as looking:
                wait_until(lambda: not scalar(looking, "SELECT count(*) FROM sidejob.messages"), timeout=60,
                           message="the last tasks to run")  # fmt: skip
    with redis.Redis.from_url(env["BROKER_URL"]) as broker:
        broker.flushall()
    return served / seconds
