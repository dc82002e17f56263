"""Hours of mixed load with outages in every state, judged all the time and at the end.

python -m benchmarks soak --minutes 120 --broker redis --seed 1 --out soak.json
"""

from __future__ import annotations

# Workers and clients import this file with theirs: nothing heavy here.
import argparse
import random

BROKERS = {"redis": ["redis"], "rabbitmq": ["rabbitmq"], "both": ["redis", "rabbitmq"]}


def main(arguments: list[str]) -> int:
    """Soak; exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0, help="of load and faults, on each broker (120)")
    parser.add_argument("--broker", choices=BROKERS, default="redis", help="both: one after the other")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="draws load and faults")
    parser.add_argument("--rate", type=float, default=1.0, help="asks per second of each client (1)")
    parser.add_argument("--clients", type=int, default=2, help="how many clients (2)")
    parser.add_argument("--pools", default="prefork,solo,prefork", help="workers; the last one is never killed")
    parser.add_argument("--out", help="write the figures there, as Markdown if it ends in .md, else as JSON")
    given = parser.parse_args(arguments)
    from benchmarks.soak.soak import Soak

    wrong = 0
    for broker in BROKERS[given.broker]:
        soak = Soak(
            minutes=given.minutes, broker=broker, seed=given.seed, rate=given.rate, clients=given.clients,
            pools=given.pools.split(","), out=given.out,
        )  # fmt: skip
        wrong += soak.run()
    return 1 if wrong else 0
