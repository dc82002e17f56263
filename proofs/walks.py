"""Long walks of the machines of `tests/twins`: what `dataflow` and `graph` have in common."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable

from celery_sidejob import embedded
from tests.tools.databases import prepare_template
from tests.tools.in_process import Stage
from tests.twins.machine import Counted, Twins
from tests.twins.real import RealTwin
from tests.twins.walks import beside, walk

WALKS, STEPS = 10, 50
"""Walks for each seed, and rules in each."""


def take(
    name: str, description: str, arguments: list[str], machine: type[Twins], real: Callable[[Stage], RealTwin]
) -> None:
    """Walk with one seed after the other until so many operations are done, and tell of each seed."""
    parser = argparse.ArgumentParser(prog=f"python -m proofs {name}", description=description)
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first walks; the next ones count on from it")
    given = parser.parse_args(arguments)
    logging.getLogger("celery_sidejob").setLevel(logging.CRITICAL)  # lost runs and failed jobs are what is wanted
    began, number = time.monotonic(), given.seed
    with embedded.Postgres(durable=False) as postgres:
        prepare_template(postgres.url)
        with beside(machine, real, postgres.url):
            while Counted.operations < given.operations:
                walk(machine, number, walks=WALKS, steps=STEPS)
                passed = time.monotonic() - began
                print(f"{passed:7.0f} s  seed {number}: {Counted.operations} operations", flush=True)
                number += 1
    print(f"{Counted.operations} operations, and the store was as the model says", flush=True)
