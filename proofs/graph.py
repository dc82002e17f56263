"""The life of jobs and their families on a real Postgres, compared with a plain model in memory after each step.

    python -m proofs graph [--operations 200000] [--seed 1]

The Hypothesis machine of `tests/graph`, of which the tests take a short walk: clients that make, ask, terminate, adopt,
disown, name and delete jobs, get in between another client's look and its lock, and die before or after their commit;
transactions of the callers' own; timers, and a clock that is moved; stale deliveries; runs whose steps do all that in
units, raise, suspend, try again, and die at a commit; runs that are lost, given back, and go on as zombies. Statuses,
parents, names, aliases, timers, what is owed, losses and the dead set are compared; at each walk's end all that is owed
is done, and nothing waits any more. Each call counts as an operation, and in a run its begin, its end and each step.
The first step after which the store is not as the model says ends it; what led there is printed.
"""

from __future__ import annotations

from proofs import walks
from tests.graph.machine import Graph
from tests.graph.real import Real


def main(arguments: list[str]) -> None:
    """Walk until so many operations are done."""
    walks.take("graph", __doc__.splitlines()[0], arguments, Graph, Real)
