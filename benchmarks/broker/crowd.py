"""Many workers on one queue."""

from __future__ import annotations

import time
from collections import Counter

from benchmarks.broker.stage import Stage, told
from benchmarks.idle import cpu_of
from benchmarks.turns import Median, take_turns
from tests.tools.waiting import wait_until

TASKS = 12_000
SIDES = {"few": 2, "many": 16}
LEAST_RATE = 0.8
LEAST_SHARE = 0.5
"""The smallest share of a worker, of what would be even."""


def measure(stage: Stage, rounds: int) -> bool:
    """Drain a queue by 2 and by 16 workers in turns; tell whether the bounds are met."""
    for side, count in SIDES.items():
        for _ in range(count):
            stage.start(side)
    cpu_s: dict[str, list[float]] = {side: [] for side in SIDES}
    shares: list[Counter[int]] = []

    def drain(side: str) -> float:
        before_s, began = cpu_of(stage.postgres.pid), time.time()
        stage.send(side, TASKS)
        noted: list[tuple[int, float]] = []

        def done() -> bool:
            noted.extend(stage.noted())
            return len(noted) >= TASKS

        wait_until(done, timeout=120, interval=0.1, message=f"{TASKS} tasks to begin")
        wait_until(lambda: not stage.one("SELECT count(*) FROM sidejob.broker_messages"), message="all to be removed")
        cpu_s[side].append((cpu_of(stage.postgres.pid) - before_s) / TASKS)
        if side == "many":
            shares.append(Counter(worker for worker, _ in noted))
        assert len(noted) == TASKS, "each ran once"
        return TASKS / (max(at for _, at in noted) - began)

    found = take_turns({"few": lambda: drain("few"), "many": lambda: drain("many")}, rounds)
    ratio = Median.of_ratios(found["many"], found["few"])
    least = Median.of([min(one.values()) * SIDES["many"] / TASKS if len(one) == 16 else 0.0 for one in shares[1:]])
    deadlocks = stage.one("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    for side, count in SIDES.items():
        costs = Median.of([1e6 * one for one in cpu_s[side][1:]])
        print(f"{count} workers: {Median.of(found[side])} tasks a second, {costs} us of Postgres for each")
    kept = [
        told("16 workers' rate, of that of 2", ratio, f"at least {LEAST_RATE}", ratio.upper >= LEAST_RATE),
        told(
            "the smallest share of a worker, of an even one",
            least,
            f"at least {LEAST_SHARE}",
            least.upper >= LEAST_SHARE,
        ),
        told("deadlocks", deadlocks, "0", not deadlocks),
    ]
    stage.end_workers()
    return all(kept)
