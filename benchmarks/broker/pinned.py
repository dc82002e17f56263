"""A transaction that somebody left open: what was removed since cannot be vacuumed."""

from __future__ import annotations

import time

import psycopg

from benchmarks.broker.stage import Stage, told
from tests.tools.waiting import wait_until

BACKLOG = 1000
STEP_S = 10.0
WARM_S = 10.0
LEAST_RATE = 0.8
MOST_DEAD = 2.2
"""Dead rows of a message: one when it is taken, one when it is removed; a few are taken twice."""
_DEAD = "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'broker_messages' AND schemaname = 'sidejob'"


def measure(stage: Stage, minutes: float) -> bool:
    """Keep a worker busy meanwhile; tell whether it is as fast in the last tenth as in the first."""
    stage.start("busy", pool="prefork", concurrency=2)
    _feed(stage, WARM_S)
    stage.noted()
    with psycopg.connect(stage.postgres.url) as pin:
        pin.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        pin.execute("SELECT count(*) FROM sidejob.broker_queues")
        rates = [_feed(stage, STEP_S) for _ in range(max(4, round(60 * minutes / STEP_S)))]
        done = STEP_S * sum(rates)
        dead = stage.one(_DEAD)
    tenth = max(2, len(rates) // 10)
    first, last = (sum(some) / tenth for some in (rates[:tenth], rates[-tenth:]))
    print(f"{minutes:g} minutes with a transaction held open; tasks a second in each {STEP_S:g} s:")
    print(" ".join(f"{rate:.0f}" for rate in rates))
    kept = [
        told(
            "the last tenth's rate, of the first's",
            f"{last / first:.2f}",
            f"at least {LEAST_RATE}",
            last / first >= LEAST_RATE,
        ),
        told("dead rows a message", f"{dead / done:.2f}", f"at most {MOST_DEAD}", dead / done <= MOST_DEAD),
    ]
    stage.end_workers()
    began = time.monotonic()
    wait_until(lambda: stage.one(_DEAD) < dead / 10, timeout=180, interval=1, message="autovacuum to remove dead rows")
    print(f"autovacuum had removed them {time.monotonic() - began:.0f} s after the transaction's end")
    return all(kept)


def _feed(stage: Stage, seconds: float) -> float:
    """Send so that there is always enough to do, and return how many tasks a second began."""
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        if stage.unnoted < BACKLOG:  # not asked of Postgres, where it would step over all dead rows
            stage.send("busy", BACKLOG)
        count += len(stage.noted())
        time.sleep(0.05)
    return count / (time.monotonic() - began)
