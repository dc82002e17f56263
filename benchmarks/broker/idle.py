"""Workers that have nothing to do."""

from __future__ import annotations

import sys
import time

from benchmarks.broker.stage import Stage, told
from benchmarks.idle import STATEMENTS_PER_S, cpu_of
from tests.tools.waiting import wait_until

SETTLING_S = 15.0
SECONDS = 60.0
QUIET = ("--without-gossip", "--without-mingle")


def measure(stage: Stage, workers: int) -> bool:
    """Count the statements of so many workers, with gossip and without; tell whether they are few enough."""
    bound = STATEMENTS_PER_S * workers / 50
    kept = True
    for name, flags in {"without gossip": QUIET, "as Celery comes": ()}.items():
        argv = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "benchmarks.broker.tasks",
            "worker",
            "--pool=solo",
            "--loglevel=INFO",
            *flags,
        ]
        for number in range(workers):
            worker = stage.processes.start([*argv, "-n", f"idle{number}@test"], env=stage.env, name=f"idle{number}")
            worker.wait_for_log("ready.", 120)
        wait_until(lambda: stage.one("SELECT count(*) FROM sidejob.broker_consumers") == workers, timeout=60)
        time.sleep(SETTLING_S)
        statements_s, cpu_share = _counted(stage)
        print(f"{workers} idle workers {name}: {100 * cpu_share:.1f} % of a core for Postgres")
        kept &= told(f"statements a second, {name}", f"{statements_s:.1f}", f"at most {bound:g}", statements_s <= bound)
        stage.end_workers()
    return kept


def _counted(stage: Stage) -> tuple[float, float]:
    stage.looking.execute("SELECT pg_stat_statements_reset()")
    before_s, began = cpu_of(stage.postgres.pid), time.monotonic()
    time.sleep(SECONDS)
    took = time.monotonic() - began
    found = stage.looking.execute(
        "SELECT calls, left(query, 80) FROM pg_stat_statements ORDER BY 1 DESC LIMIT 8"
    ).fetchall()
    for calls, query in found:
        print(f"  {calls / took:7.1f}/s  {' '.join(query.split())}")
    total = stage.one("SELECT sum(calls)::bigint FROM pg_stat_statements")
    return total / took, (cpu_of(stage.postgres.pid) - before_s) / took
