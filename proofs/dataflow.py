"""Ports, channels and runs on a real Postgres, compared with a plain model in memory after each step.

    python -m proofs dataflow [--operations 200000] [--seed 1]

The Hypothesis machine of `tests/dataflow`, of which the tests take a short walk: three jobs; clients that write,
publish, connect, configure, subscribe, read, and get in between another client's look and its lock; runs whose turns
read, write, commit by themselves, by `checkpoint()` or by `job.unit(transaction=)`, raise, and die before or after a
commit. Each call counts as an operation, and in a run its begin, its end, each turn and each step of a turn. The first
step after which the store is not as the model says ends it; what led there is printed.
"""

from __future__ import annotations

from proofs import walks
from tests.dataflow.machine import Dataflow
from tests.dataflow.real import Real


def main(arguments: list[str]) -> None:
    """Walk until so many operations are done."""
    walks.take("dataflow", __doc__.splitlines()[0], arguments, Dataflow, Real)
