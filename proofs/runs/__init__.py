"""Jobs with and without steps, and durable tasks, whose workers and processes are killed: each effect counts once.

    python -m proofs runs [--broker redis,sidejob,sidejobpg,amqp] [--kills 500] [--seed 1] [--pool prefork]

Four workers of two processes each. Every few tenths of a second `kill -9` meets a process of a pool, a main process
(its pool follows by itself), or a worker with all its processes, also while it starts; another takes its place. In the
end each job must have completed with the value that it has without kills, each row of its own, packet and child must be
there once, each durable task must have ended as its `on_lost` allows, and the store must have counted as losses the
deaths of those runs that had begun. What it counts is noted by triggers, and what began by the bodies. With the pool
asyncio the bodies are coroutines, thirty at a time, and a kill meets the one process of a worker.
"""

from __future__ import annotations

# Workers import this file with theirs: nothing heavy here.
import argparse
import random

BROKERS = ("redis", "sidejob", "sidejobpg", "amqp")


def main(arguments: list[str]) -> int:
    """Kill, print, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m proofs runs", description=__doc__.splitlines()[0])
    parser.add_argument("--broker", default=",".join(BROKERS), help="one or several (%(default)s)")
    parser.add_argument("--kills", type=int, default=500, help="on each broker (500)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--pool", choices=["prefork", "asyncio"], default="prefork")
    given = parser.parse_args(arguments)
    from proofs.runs.storm import run

    print(f"seed {given.seed}", flush=True)
    return max(run(broker, given.kills, seed=given.seed, pool=given.pool) for broker in given.broker.split(","))
