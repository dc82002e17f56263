"""Walks of a machine: rules in a random order, from a new world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.tools.in_process import EMPTY, Stage
from tests.twins.machine import Twins
from tests.twins.real import RealTwin

ANY: dict[str, Any] = {
    "database": None, "deadline": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck),
}  # fmt: skip


@contextmanager
def beside(machine: type[Twins], real: Callable[[Stage], RealTwin], database_url: str) -> Iterator[None]:
    """Within the block the machine has a store of its own in an empty database, which is left empty."""
    stage = Stage(database_url, sidejob_max_losses=1_000_000)
    try:
        with real(stage).armed() as machine.real:
            yield
    finally:
        stage.sql(EMPTY)
        stage.close()


def short_walk(machine: type[Twins], *, walks: int = 8, steps: int = 30) -> None:
    """Walk a little, each time in the same way: a test."""
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=walks, stateful_step_count=steps, derandomize=True, print_blob=False, **ANY),
    )


def walk(machine: type[Twins], number: int, *, walks: int, steps: int) -> None:
    """Walk so many times with one seed."""
    run_state_machine_as_test(
        seed(number)(machine), settings=settings(max_examples=walks, stateful_step_count=steps, **ANY)
    )
