"""Durable tasks of all forms in a storm of kills and outages: each accepted one ends in success or the dead set, once.

    python -m benchmarks storm --tasks 10000 --seed 11 [--broker redis|rabbitmq|both]

It starts a Postgres, a broker and a Redis for results of its own, workers, a beat and clients. Clients note with fsync
what a call has returned; the store itself notes every move of a row, by triggers; bodies note their beginning and end.
"""

from __future__ import annotations

import argparse
import random

BROKERS = {"redis": ["redis"], "rabbitmq": ["rabbitmq"], "both": ["redis", "rabbitmq"]}


def main(arguments: list[str]) -> int:
    """Storm; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks storm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=10_000, help="accepted ones, after which the storm ends (10000)")
    parser.add_argument("--broker", choices=BROKERS, default="redis", help="both: one after the other")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="draws tasks and faults")
    parser.add_argument("--rate", type=float, default=10.0, help="calls per second of each client (10)")
    parser.add_argument("--clients", type=int, default=3, help="how many clients (3)")
    parser.add_argument("--pools", default="prefork,prefork,threads", help="workers; the last one is never killed")
    given = parser.parse_args(arguments)
    from benchmarks.storm.storm import Storm

    wrong = 0
    for broker in BROKERS[given.broker]:
        storm = Storm(
            tasks=given.tasks, broker=broker, seed=given.seed, rate=given.rate, clients=given.clients,
            pools=given.pools.split(","),
        )  # fmt: skip
        wrong += len(storm.run())
    return 1 if wrong else 0
