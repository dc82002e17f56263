"""What soak and storm can be told on the command line alike."""

from __future__ import annotations

import argparse
import random

BROKERS = {one: [one] for one in ("redis", "rabbitmq", "postgres")} | {"both": ["redis", "rabbitmq"]}


def parser(name: str, text: str, *, rate: float, clients: int, pools: str) -> argparse.ArgumentParser:
    """Return a parser of the options that both have, with these defaults."""
    made = argparse.ArgumentParser(prog=f"python -m proofs {name}", description=text.splitlines()[0])
    made.add_argument(
        "--broker", choices=BROKERS, default="redis", help="both: Redis, then RabbitMQ; postgres: the store itself"
    )
    made.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="draws load and faults")
    made.add_argument("--rate", type=float, default=rate, help=f"calls per second of each client ({rate:g})")
    made.add_argument("--clients", type=int, default=clients, help=f"how many clients ({clients})")
    made.add_argument("--pools", default=pools, help=f"workers; the last one is never killed ({pools})")
    return made
