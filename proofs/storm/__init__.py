"""Durable tasks of all forms in a storm of kills and outages: each accepted one ends in success or the dead set, once.

    python -m proofs storm --tasks 10000 --seed 11 [--broker redis|rabbitmq|both]

It starts a Postgres, a broker and a Redis for results of its own, workers, a beat and clients. Clients note with fsync
what a call has returned; the store itself notes every move of a row, by triggers; bodies note their beginning and end.
"""

from __future__ import annotations

# Workers and clients import this file with theirs: nothing heavy here.
from proofs.trial.arguments import BROKERS, parser


def main(arguments: list[str]) -> int:
    """Storm; return 1 if a promise was broken."""
    options = parser("storm", __doc__ or "", rate=10.0, clients=3, pools="prefork,prefork,threads")
    options.add_argument("--tasks", type=int, default=10_000, help="accepted ones, after which the storm ends (10000)")
    given = options.parse_args(arguments)
    from proofs.storm.storm import Storm

    wrong = 0
    for broker in BROKERS[given.broker]:
        storm = Storm(
            tasks=given.tasks, broker=broker, seed=given.seed, rate=given.rate, clients=given.clients,
            pools=given.pools.split(","),
        )  # fmt: skip
        wrong += len(storm.run())
    return 1 if wrong else 0
