"""Ports, channels and runs on a real Postgres, compared with a plain model in memory after each step.

    python -m benchmarks dataflow [--operations 200000] [--seed 1]

The Hypothesis machine of `tests/dataflow`, of which the tests take a short walk: three jobs; clients that write,
publish, connect, configure, subscribe, read, and get in between another client's look and its lock; runs whose turns
read, write, commit by themselves, by `checkpoint()` or by `job.unit(transaction=)`, raise, and die before or after a
commit. Each call counts as an operation, and in a run its begin, its end, each turn and each step of a turn. The first
step after which the store is not as the model says ends it; what led there is printed.
"""

from __future__ import annotations

import argparse
import logging
import time

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from celery_sidejob import embedded
from tests.dataflow.machine import Counted, Dataflow
from tests.dataflow.real import Real
from tests.tools.databases import prepare_template
from tests.tools.in_process import Stage

WALKS, STEPS = 10, 50
"""Walks for each seed, and rules in each."""


def main(arguments: list[str]) -> None:
    """Walk until so many operations are done."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks dataflow", description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first walks; the next ones count on from it")
    given = parser.parse_args(arguments)
    logging.getLogger("celery_sidejob").setLevel(logging.CRITICAL)  # lost runs and failed jobs are what is wanted
    began = time.monotonic()
    with embedded.Postgres(durable=False) as postgres:
        prepare_template(postgres.url)
        stage = Stage(postgres.url, sidejob_max_losses=1_000_000)
        try:
            with Real(stage).armed() as Dataflow.real:
                walk(given.operations, given.seed, began)
        finally:
            stage.close()
    print(f"{Counted.operations} operations, and the store was as the model says", flush=True)


def walk(operations: int, first_seed: int, began: float) -> None:
    """Walk with one seed after the other, and tell of each."""
    number = first_seed
    while Counted.operations < operations:
        run_state_machine_as_test(
            seed(number)(Dataflow),
            settings=settings(
                max_examples=WALKS, stateful_step_count=STEPS, database=None, deadline=None,
                phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
        print(f"{time.monotonic() - began:7.0f} s  seed {number}: {Counted.operations} operations", flush=True)
        number += 1
