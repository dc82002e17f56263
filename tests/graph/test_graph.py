"""A short walk of the machine; `python -m benchmarks graph` takes a long one."""

from __future__ import annotations

from tests.graph.machine import Graph
from tests.graph.real import Real
from tests.twins.walks import beside, short_walk


def test_the_store_does_what_the_model_does(stage_database_url: str) -> None:
    with beside(Graph, Real, stage_database_url):
        short_walk(Graph)
